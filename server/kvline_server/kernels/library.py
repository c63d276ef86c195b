"""Builds the FlashInfer kernels that we use: python -m kvline_server.kernels.library FILE [NAMES]

Needs nvcc (CUDA_HOME), a C++ compiler, ninja and the packages of requirements/cuda.txt; no GPU.
FILE becomes an archive with the layout of FlashInfer's cache of built kernels, which
server/cuda.Dockerfile unpacks and `make test-gpu KIT=` uses on a bare machine. Names select some of
the modules. Takes minutes on 16 cores, an hour on two.
"""

from __future__ import annotations

import itertools
import os
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("FLASHINFER_CUDA_ARCH_LIST", "9.0a")

DIMS = (64, 128, 256)


def specs() -> list[Any]:
    """The modules that flashinfer.py, flashinfer_attention.py and bf16_linear.py load."""
    import torch
    from flashinfer.jit import activation, attention, norm, sampling, topk
    from flashinfer.jit.gemm.core import gen_mm_bf16_cublaslt_module
    from flashinfer.jit.tinygemm2 import gen_tinygemm2_module

    caches = (("fa2", torch.bfloat16), ("fa3", torch.bfloat16), ("fa2", torch.float8_e4m3fn))
    prefills = [
        attention.gen_batch_prefill_module(
            backend,
            *(torch.bfloat16, cache, torch.bfloat16, torch.int32),
            *(dim, dim, 0, windowed, False, False),
        )
        for (backend, cache), dim, windowed in itertools.product(caches, DIMS, (False, True))
    ]
    return [
        activation.gen_act_and_mul_module("silu"),
        activation.gen_act_and_mul_module("gelu_tanh"),
        norm.gen_norm_module(),
        sampling.gen_sampling_module(),
        topk.gen_topk_module(),
        gen_mm_bf16_cublaslt_module(),
        gen_tinygemm2_module(),
        *prefills,
    ]


def main(argv: list[str]) -> int:
    if not argv:
        print(__doc__, file=sys.stderr)
        return 2
    from flashinfer.aot import copy_built_kernels
    from flashinfer.jit.core import build_jit_specs

    wanted = set(argv[1:])
    chosen = [spec for spec in specs() if not wanted or spec.name in wanted]
    print(f"building {', '.join(spec.name for spec in chosen)}", flush=True)
    build_jit_specs(chosen, verbose=False, skip_prebuilt=False)
    with tempfile.TemporaryDirectory() as scratch, tarfile.open(argv[0], "w:xz") as archive:
        copy_built_kernels(chosen, Path(scratch))
        for folder in sorted(Path(scratch).iterdir()):
            archive.add(folder, folder.name)
    print(f"{argv[0]}: {len(chosen)} modules")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
