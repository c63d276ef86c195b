# The inference server for one NVIDIA GPU of compute capability 9.x. No compiler, nothing compiled at
# a start. The context holds, in dist/, the wheel (uv build --wheel), kernels.tar.xz (FlashInfer's,
# made by `make kernels` where nvcc is) and cubins.bin (our own, `make cubins`).
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
ARG UV=0.13.9
ARG SITE=/opt/kvline/lib/python3.11/site-packages
# Taken out in the layer that brought it: what only compiles (Triton, ninja), what only Blackwell
# runs, what only profiles, plug-ins for networks whose own libraries are not here, and libraries of
# CUDA that no model here calls (Fourier transforms, sparse matrices, solvers, random numbers).
# Stubs take the places of those that torch names. The secret is optional, as in server/Dockerfile.
COPY requirements/cuda.txt /tmp/requirements.txt
COPY server/kvline_image/*.py /tmp/slim/kvline_image/
RUN --mount=type=secret,id=registry --mount=type=cache,target=/root/.cache/uv \
    if [ -f /run/secrets/registry ]; then set -a; . /run/secrets/registry; set +a; fi; \
    python3 -m venv /tmp/uv && /tmp/uv/bin/pip install --quiet --no-cache-dir uv==${UV} && \
    python3 -m venv --without-pip /opt/kvline && \
    /tmp/uv/bin/uv pip install --quiet --python /opt/kvline/bin/python --link-mode=copy \
        --compile-bytecode --no-deps --require-hashes --requirements /tmp/requirements.txt && \
    cd ${SITE} && rm -rf triton nvidia_cutlass_dsl cuda/tile flashinfer/data/cutlass \
        torch/include torch/share torch/bin/protoc* torch/bin/ptxas torch/lib/libtorch_cuda_linalg.so \
        nvidia/*/include nvidia/*/lib/*.a nvidia/*/lib/*.bc nvidia/*/lib/*alt.so* nvidia/cusparselt && \
    (cd nvidia/cu13/lib && rm libcufft* libcusparse* libcusolver* libcurand* libnvJitLink* libnvblas* \
        libnvperf* libpcsampling* libcheckpoint* libcufile_rdma*) && \
    (cd nvidia/nvshmem/lib && rm *_mpi.* *_pmix.* *_shmem.* *_ibdevx.* *_ibgda.* *_libfabric.* *_ucx.*) && \
    PYTHONPATH=/tmp/slim /opt/kvline/bin/python -B -m kvline_image.slim . libcufft.so.12 \
        libcusparse.so.12 libcusparseLt.so.0 libcurand.so.10 && \
    rm -rf /opt/kvline/bin/ninja /tmp/uv /tmp/slim /tmp/requirements.txt
# Added and copied, not mounted: some builders take a layer of an earlier build whatever a mount holds.
ADD dist/kernels.tar.xz ${SITE}/flashinfer/data/aot/
COPY dist/kvline-0.1.0-py3-none-any.whl /tmp/kvline-0.1.0-py3-none-any.whl
RUN python3 -m zipfile -e /tmp/kvline-0.1.0-py3-none-any.whl ${SITE} && \
    /opt/kvline/bin/python -m compileall -q ${SITE}/kvline_* && \
    rm /tmp/kvline-0.1.0-py3-none-any.whl
COPY dist/cubins.bin ${SITE}/kvline_server/kernels/cubins.bin
# Nothing in the image may change who runs it: make image-check.
RUN find / -xdev -type f -perm /6000 -exec chmod a-s {} +
# Where nodes without a container toolkit mount the driver, as GKE's do; the toolkit's own way and
# CDI need nothing.
ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib64:/usr/local/nvidia/lib
ENV PATH=/opt/kvline/bin:/usr/local/bin:/usr/bin:/bin PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    FLASHINFER_DISABLE_JIT=1 FLASHINFER_CUDA_ARCH_LIST=9.0a
USER 65532:65532
# The kernel drops a signal that a container's first process has no handler for yet: without this one
# a pod that is deleted while Python starts stays for its whole grace period.
ENTRYPOINT ["/opt/kvline/bin/dumb-init", "--single-child", "--", "/opt/kvline/bin/python", "-m", "kvline_server"]
