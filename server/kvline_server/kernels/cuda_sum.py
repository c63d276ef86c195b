"""The sum of the ranks' parts of few rows, added to the residual stream, on GPUs that reach each
other's memory.

Every rank adds up all parts itself, and the residual in the same kernel: one exchange, where a sum
in two shots takes two. Of very few rows each rank writes its part into the others' memory, of more
it reads theirs after an exchange of flags; of many rows two shots move fewer bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvline_contract.report import MAX_RANKS
from kvline_server.kernels.cubins import TRITON_TYPES, Variant, launch

BLOCK, WARPS = 1024, 4
PROGRAMS = 128  # at most: all of them run at once on any GPU that this is for
ALIGN = 32  # of the number of numbers, for vector loads
WORD = torch.bfloat16.itemsize * 2  # bytes of two numbers, which are written with what sum it is
WORDS = 256  # of a program at a time
PUSHED_BYTES = 256 << 10  # of hidden states, at most
INBOX_BYTES = 2 * 2 * PUSHED_BYTES  # for each rank: two halves of 8 bytes a word


def run(buffers: int, flags: int, residual: torch.Tensor, rank: int, ranks: int) -> None:
    """`buffers` and `flags` are addresses of arrays with each rank's pointer; a flag is an int32
    for each program and rank, 0 between two runs. residual [rows, hidden], changed in place"""
    elements = residual.numel()
    programs = min(PROGRAMS, -(-elements // BLOCK))
    launch(_variant(residual.dtype, ranks), programs, buffers, flags, residual, elements, rank)


def push(
    inboxes: int,
    epochs: torch.Tensor,
    part: torch.Tensor,
    residual: torch.Tensor,
    rank: int,
    ranks: int,
) -> None:
    """`inboxes` is the address of an array with each rank's pointer to its inbox, of INBOX_BYTES a
    rank, at first 0; epochs int32 [PROGRAMS], at first 0. part, residual bfloat16 [rows, hidden],
    of at most PUSHED_BYTES; the residual is changed in place"""
    words = residual.nbytes // WORD
    programs = min(PROGRAMS, -(-words // WORDS))
    launch(_push_variant(ranks), programs, inboxes, epochs, part, residual, words, rank)


def variants(dtype: torch.dtype) -> Iterator[Variant]:
    """All variants that are launched here."""
    for ranks in range(2, MAX_RANKS + 1):
        yield _variant(dtype, ranks)
        yield _push_variant(ranks)


def _variant(dtype: torch.dtype, ranks: int) -> Variant:
    arguments = ("*i64", "*i64", f"*{TRITON_TYPES[dtype]}", "i32", "i32")
    constants = (("RANKS", ranks), ("BLOCK", BLOCK))
    return Variant("sum_add", arguments, (2, 3), constants, warps=WARPS)


def _push_variant(ranks: int) -> Variant:
    arguments = ("*i64", "*i32", "*i32", "*i32", "i32", "i32")
    constants = (("SLOT", PUSHED_BYTES // WORD), ("RANKS", ranks), ("BLOCK", WORDS))
    return Variant("push_add", arguments, (2, 3, 4), constants, warps=WARPS)
