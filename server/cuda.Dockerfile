# The inference server for one NVIDIA GPU of compute capability 9.x. No compiler, nothing compiled at
# a start. The context holds, in dist/, the wheel (uv build --wheel), kernels.tar.xz (FlashInfer's,
# made by `make kernels` where nvcc is) and cubins.bin (our own, `make cubins`).
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
ARG UV=0.13.9
ARG SITE=/opt/kvline/lib/python3.11/site-packages
# What only compiles (Triton, ninja) and what only Blackwell runs is taken out in the layer that
# brought it. The secret is optional, as in server/Dockerfile.
COPY requirements/cuda.txt /tmp/requirements.txt
RUN --mount=type=secret,id=registry --mount=type=cache,target=/root/.cache/uv \
    if [ -f /run/secrets/registry ]; then set -a; . /run/secrets/registry; set +a; fi; \
    python3 -m venv /tmp/uv && /tmp/uv/bin/pip install --quiet --no-cache-dir uv==${UV} && \
    python3 -m venv --without-pip /opt/kvline && \
    /tmp/uv/bin/uv pip install --quiet --python /opt/kvline/bin/python --link-mode=copy \
        --compile-bytecode --no-deps --require-hashes --requirements /tmp/requirements.txt && \
    rm -rf ${SITE}/triton ${SITE}/nvidia_cutlass_dsl ${SITE}/cuda/tile /opt/kvline/bin/ninja \
        ${SITE}/torch/include ${SITE}/flashinfer/data/cutlass \
        ${SITE}/nvidia/*/include /tmp/uv /tmp/requirements.txt
RUN --mount=type=bind,source=dist,target=/tmp/dist \
    python3 -m zipfile -e /tmp/dist/kvline-0.1.0-py3-none-any.whl ${SITE} && \
    mkdir -p ${SITE}/flashinfer/data/aot && \
    python3 -m tarfile -e /tmp/dist/kernels.tar.xz ${SITE}/flashinfer/data/aot && \
    cp /tmp/dist/cubins.bin ${SITE}/kvline_server/kernels/cubins.bin && \
    /opt/kvline/bin/python -m compileall -q ${SITE}/kvline_server
# Nothing in the image may change who runs it: make image-check.
RUN find / -xdev -type f -perm /6000 -exec chmod a-s {} +
# Where nodes without a container toolkit mount the driver, as GKE's do; the toolkit's own way and
# CDI need nothing.
ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib64:/usr/local/nvidia/lib
ENV PATH=/opt/kvline/bin:/usr/local/bin:/usr/bin:/bin PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    FLASHINFER_DISABLE_JIT=1 FLASHINFER_CUDA_ARCH_LIST=9.0a
USER 65532:65532
ENTRYPOINT ["/opt/kvline/bin/python", "-m", "kvline_server"]
