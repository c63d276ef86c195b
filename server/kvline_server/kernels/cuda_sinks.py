"""Sinks of attention on a GPU: what attention without them returns, multiplied by the softmax's
share that is not the sink's (docs/decisions/058).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvline_server.kernels.cubins import TRITON_TYPES, Variant, launch
from kvline_server.kernels.cuda_write import DIMS

NUMBERS = 2048  # of a program


def apply(out: torch.Tensor, log_sums: torch.Tensor, sinks: torch.Tensor) -> None:
    """In place. out [rows, heads, dim], contiguous; `log_sums`, float32 [rows, heads]: log2 of each
    softmax's sum of exponentials; sinks float32 [heads]"""
    rows, heads, dim = out.shape
    variant, lines = _variant(out.dtype, dim), rows * heads
    launch(variant, -(-lines * dim // NUMBERS), out, log_sums, sinks, lines, heads)


def variants(dtype: torch.dtype) -> Iterator[Variant]:
    """All variants that `apply` launches."""
    for dim in DIMS:
        yield _variant(dtype, dim)


def _variant(dtype: torch.dtype, dim: int) -> Variant:
    arguments = (f"*{TRITON_TYPES[dtype]}", "*fp32", "*fp32", "i32", "i32")
    constants = (("DIM", dim), ("LINES", NUMBERS // dim))
    return Variant("apply_sinks", arguments, (0, 1, 2), constants)
