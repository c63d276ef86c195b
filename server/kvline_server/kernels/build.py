"""Compiles our Triton kernels ahead of time: python -m kvline_server.kernels.build [FILE]

An image has the file beside these modules, so a pod compiles nothing. Needs Triton, but no GPU and
no C compiler.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec
import torch

from kvline_server.kernels import (
    cubins,
    cuda_all_reduce,
    cuda_attention,
    cuda_encoder,
    cuda_experts,
    cuda_linear,
    cuda_mxfp4,
    cuda_recurrent,
    cuda_rows,
    cuda_sinks,
    cuda_write,
    fp8_linear,
)
from kvline_server.kernels.cubins import Variant

CAPABILITY = 90  # FlashInfer's kernels are prebuilt for it too (docs/decisions/011)


def variants() -> list[Variant]:
    """All that an image has."""
    dtype = torch.bfloat16
    attention, linears = (cuda_write, cuda_attention, cuda_sinks), (cuda_linear, fp8_linear)
    experts, layers = (cuda_experts, cuda_mxfp4), (cuda_recurrent, cuda_encoder)
    others = (*attention, *linears, cuda_all_reduce, *experts, *layers)
    return [*cuda_rows.variants(), *(v for other in others for v in other.variants(dtype))]


def build(file: Path) -> int:
    """Writes the file atomically; returns the number of kernels."""
    every = variants()
    made = {}
    printed = time.monotonic()
    for done, variant in enumerate(every):
        if time.monotonic() > printed + 5:
            printed = time.monotonic()
            print(f"{done} of {len(every)} kernels", flush=True)
        made[variant.name] = cubins.compile(variant, CAPABILITY)
    part = file.with_suffix(".part")
    built = cubins.Built(cubins.source_hash(), CAPABILITY, made)
    part.write_bytes(msgspec.msgpack.encode(built))
    part.replace(file)
    return len(made)


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else cubins.BUILT
    print(f"{target}: {build(target)} kernels for compute capability {CAPABILITY / 10}")
