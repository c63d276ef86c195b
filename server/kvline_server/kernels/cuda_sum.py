"""The sum of the ranks' parts of few rows, added to the residual stream, on GPUs that reach each
other's memory.

Every rank reads all parts itself: one exchange of flags, where a sum in two shots takes two, and
the residual's addition in the same kernel. Of many rows two shots move fewer bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvline_contract.report import MAX_RANKS
from kvline_server.kernels.cubins import TRITON_TYPES, Variant, launch

BLOCK, WARPS = 1024, 4
PROGRAMS = 128  # at most: all of them run at once on any GPU that this is for


def run(buffers: int, flags: int, residual: torch.Tensor, rank: int, ranks: int) -> None:
    """`buffers` and `flags` are addresses of arrays with each rank's pointer; a flag is an int32
    for each program and rank, 0 between two runs. residual [rows, hidden], changed in place"""
    elements = residual.numel()
    programs = min(PROGRAMS, -(-elements // BLOCK))
    launch(_variant(residual.dtype, ranks), programs, buffers, flags, residual, elements, rank)


def variants(dtype: torch.dtype) -> Iterator[Variant]:
    """All variants that are launched here."""
    return (_variant(dtype, ranks) for ranks in range(2, MAX_RANKS + 1))


def _variant(dtype: torch.dtype, ranks: int) -> Variant:
    arguments = ("*i64", "*i64", f"*{TRITON_TYPES[dtype]}", "i32", "i32")
    constants = (("RANKS", ranks), ("BLOCK", BLOCK))
    return Variant("sum_add", arguments, (2, 3), constants, warps=WARPS)
