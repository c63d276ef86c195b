"""What no library has for rows of logits, as Triton kernels: one program a row.

Scoring reads each logit once and needs no fp32 copy of the chunk. Drawing takes a number a row from
outside, so that a seeded request says the same whoever sits beside it (a library's generator is
shared by the batch). Reference: kernels/torch_rows.py; the tests compare the two.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK, WARPS = 4096, 8
DRAW_BLOCK, DRAW_WARPS = 16384, 16  # few rows: each program must keep its processor busy alone


@triton.jit  # type: ignore[untyped-decorator]
def _score(  # type: ignore[no-untyped-def]
    logits, stride, targets, values, ranks, normalisers, vocabulary, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    start_of_row = logits + row.to(tl.int64) * stride
    chosen = tl.load(start_of_row + tl.load(targets + row)).to(tl.float32)
    most = -1.0e30
    total = tl.zeros((BLOCK,), tl.float32)
    above = tl.zeros((BLOCK,), tl.int32)
    # One maximum a block and not a lane: an exponential a logit, which is what the time goes to.
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(start_of_row + at, mask=at < vocabulary, other=-1.0e30).to(tl.float32)
        above += (x > chosen).to(tl.int32)
        now = tl.maximum(most, tl.max(x, axis=0))
        total = total * tl.exp(most - now) + tl.exp(x - now)
        most = now
    normaliser = most + tl.log(tl.sum(total, axis=0))
    tl.store(values + row, chosen - normaliser)
    tl.store(normalisers + row, normaliser)
    tl.store(ranks + row, tl.sum(above, axis=0) + 1)


def score(
    logits: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probability and rank of each row's target, and log of the sum of exponentials.
    logits [rows, vocabulary], targets int64 [rows] -> float32, int32, float32 [rows]"""
    rows, vocabulary = logits.shape
    values = torch.empty(rows, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(rows, dtype=torch.int32, device=logits.device)
    normalisers = torch.empty_like(values)
    launch: Any = _score[(rows,)]
    launch(
        logits,
        logits.stride(0),
        targets,
        values,
        ranks,
        normalisers,
        vocabulary,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return values, ranks, normalisers


@triton.jit  # type: ignore[untyped-decorator]
def _draw(  # type: ignore[no-untyped-def]
    weights,
    stride,
    temperatures,
    uniforms,
    chosen,
    vocabulary,
    LOGITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    start_of_row = weights + row.to(tl.int64) * stride
    scale = 1.0
    most = 0.0
    if LOGITS:
        scale = 1.0 / tl.load(temperatures + row)
        highest = tl.full((BLOCK,), -1.0e30, tl.float32)
        for start in range(0, vocabulary, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(start_of_row + at, mask=at < vocabulary, other=-1.0e30).to(tl.float32)
            highest = tl.maximum(highest, x)
        most = tl.max(highest, axis=0)
    # Sums block by block, in the same order twice, so that the last sum is the total to the bit.
    total = 0.0
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(start_of_row + at, mask=at < vocabulary, other=-1.0e30).to(tl.float32)
        w = tl.exp((x - most) * scale) if LOGITS else tl.maximum(x, 0.0)
        total += tl.sum(w, axis=0)
    wanted = tl.load(uniforms + row) * total
    below = 0.0
    start = 0
    last = 0
    found = -1
    while (found < 0) & (start < vocabulary):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(start_of_row + at, mask=at < vocabulary, other=-1.0e30).to(tl.float32)
        w = tl.exp((x - most) * scale) if LOGITS else tl.maximum(x, 0.0)
        after = below + tl.sum(w, axis=0)
        # The last token with any weight: where rounding would point past the end.
        last = tl.maximum(last, tl.max(tl.where(w > 0.0, at, 0), axis=0))
        if after > wanted:
            sums = below + tl.cumsum(w, axis=0)
            index = start + tl.sum((sums <= wanted).to(tl.int32), axis=0)
            found = tl.minimum(index, last)
        below = after
        start += BLOCK
    tl.store(chosen + row, tl.where(found >= 0, found, last).to(tl.int64))


def draw(
    weights: torch.Tensor, uniforms: torch.Tensor, temperatures: torch.Tensor | None = None
) -> torch.Tensor:
    """A token a row: of logits at their temperatures, or of probabilities when there are none.
    weights [rows, vocabulary]; uniforms, temperatures float32 [rows] -> int64 [rows]"""
    rows, vocabulary = weights.shape
    chosen = torch.empty(rows, dtype=torch.int64, device=weights.device)
    launch: Any = _draw[(rows,)]
    launch(
        weights,
        weights.stride(0),
        uniforms if temperatures is None else temperatures,
        uniforms,
        chosen,
        vocabulary,
        LOGITS=temperatures is not None,
        BLOCK=DRAW_BLOCK,
        num_warps=DRAW_WARPS,
    )
    return chosen
