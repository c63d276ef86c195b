#!/usr/bin/env bash
# make test-gpu: the tests that need a CUDA GPU. On a machine with the packages of the `cuda` extra
# nothing else is needed. On a bare one KIT= names a folder with their wheels (whl/*.whl) and the
# prebuilt kernels (*.tar.xz, unpacked into flashinfer/data/aot), installed aside, without a network.
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
if [ -n "${KIT:-}" ]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$site" "$KIT"/whl/*.whl
    mkdir -p "$site/flashinfer/data/aot"
    for kernels in "$KIT"/*.tar.xz; do tar xJf "$kernels" -C "$site/flashinfer/data/aot"; done
    export PYTHONPATH="$PWD/server:$site" FLASHINFER_DISABLE_JIT=1
fi
"$PYTHON" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null || {
    echo "test-gpu: torch finds no CUDA GPU here" >&2
    exit 1
}
"$PYTHON" -m pytest -q --import-mode=importlib -p no:cacheprovider -m gpu tests/gpu "$@"
