"""One-shot all-reduce of few rows, added to the residual stream, on GPUs that reach each other's
memory (peer access).

One-shot: every rank adds up all ranks' parts itself. `one_shot_ll` is for the fewest rows: each
rank writes its part into the others' memory, with the flag inside each 64-bit word, as NCCL's LL
protocol does. `one_shot` reads the others' parts after an exchange of flags. For more rows a
two-shot all-reduce moves fewer bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvline_contract.report import MAX_RANKS
from kvline_server.kernels.cubins import TRITON_TYPES, Variant, launch

BLOCK, WARPS = 1024, 4
PROGRAMS = 128  # at most: all of them run at once on any GPU that this is for
ALIGN = 32  # of the number of elements, for vector loads
LL_BYTES = 256 << 10  # that a rank writes to all others together, at most
LL_WORD = 2 * torch.bfloat16.itemsize  # bytes of two elements; the flag is as many more
LL_BLOCK = 256  # words of a program at a time
# Block b is of program b % PROGRAMS whatever the size, so that a program's epoch says what is in
# its words.
HALVES = 2  # of an inbox, by turns
INBOX_BYTES = HALVES * 2 * LL_BYTES  # for what each rank writes


def fits_ll(x: torch.Tensor, ranks: int) -> bool:
    """Whether one_shot_ll is faster: it writes twice the bytes, to each other rank."""
    return x.nbytes * (ranks - 1) <= LL_BYTES


def one_shot_ll(
    inboxes: int,
    epochs: torch.Tensor,
    part: torch.Tensor,
    residual: torch.Tensor,
    rank: int,
    ranks: int,
) -> None:
    """`inboxes` is the address of an array with the pointer to each rank's inbox, [HALVES, ranks,
    words] of 64 bits, at first 0; epochs int32 [PROGRAMS], at first 0. part, residual bfloat16
    [rows, hidden]; the residual is changed in place"""
    words = residual.nbytes // LL_WORD
    programs = min(PROGRAMS, -(-words // LL_BLOCK))
    launch(_ll_variant(ranks), programs, inboxes, epochs, part, residual, words, rank)


def one_shot(buffers: int, flags: int, residual: torch.Tensor, rank: int, ranks: int) -> None:
    """`buffers` and `flags` are addresses of arrays with each rank's pointer; a flag is an int32
    for each program and rank, 0 between two runs. residual [rows, hidden], changed in place"""
    elements = residual.numel()
    programs = min(PROGRAMS, -(-elements // BLOCK))
    launch(_variant(residual.dtype, ranks), programs, buffers, flags, residual, elements, rank)


def variants(dtype: torch.dtype) -> Iterator[Variant]:
    """All variants that are launched here."""
    for ranks in range(2, MAX_RANKS + 1):
        yield _variant(dtype, ranks)
        yield _ll_variant(ranks)


def _variant(dtype: torch.dtype, ranks: int) -> Variant:
    arguments = ("*i64", "*i64", f"*{TRITON_TYPES[dtype]}", "i32", "i32")
    constants = (("RANKS", ranks), ("BLOCK", BLOCK))
    return Variant("one_shot", arguments, (2, 3), constants, warps=WARPS)


def _ll_variant(ranks: int) -> Variant:
    arguments = ("*i64", "*i32", "*i32", "*i32", "i32", "i32")
    constants = (("SLOT", LL_BYTES // LL_WORD), ("RANKS", ranks), ("BLOCK", LL_BLOCK))
    return Variant("one_shot_ll", arguments, (2, 3, 4), constants, warps=WARPS)
