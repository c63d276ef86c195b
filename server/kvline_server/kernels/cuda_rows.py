"""Logprobs and sampling on a GPU: Triton kernels with one program per row of logits, or several."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvline_server.kernels.cubins import TRITON_TYPES, Variant, launch

BLOCK, WARPS = 4096, 8
DRAW_PARTS = 8  # programs of a row: few rows must keep the GPU busy
MASK_WARPS = 4
ALIGN = 16
LOGITS = (torch.bfloat16, torch.float32)


def score(
    logits: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probability and rank of each row's target, and log of the sum of exponentials. Targets
    are int64 ids, or their logits, float32, where `logits` are a rank's: then the rank is among
    its tokens. logits [rows, vocabulary], targets [rows] -> float32, int32, float32 [rows]"""
    rows, vocabulary = logits.shape
    values = torch.empty(rows, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(rows, dtype=torch.int32, device=logits.device)
    normalisers = torch.empty_like(values)
    variant = _score_variant(logits.dtype, targets.dtype, _aligned(logits))
    stride = logits.stride(0)
    launch(variant, rows, logits, stride, targets, values, ranks, normalisers, vocabulary)
    return values, ranks, normalisers


def draw(
    weights: torch.Tensor,
    keys: torch.Tensor,
    temperatures: torch.Tensor | None = None,
    first: int | None = None,
) -> torch.Tensor:
    """Samples a token per row, from logits with temperatures or from probabilities without: the
    highest logit at temperature 0; NO_TOKEN where a row is not finite or all 0. With `first` the
    logits are those of a rank's tokens from that one on, and the results what ranks compare.
    weights [rows, vocabulary]; keys int64, temperatures float32 [rows] -> int64 [rows]"""
    rows, vocabulary = weights.shape
    chosen = torch.empty(rows, dtype=torch.int64, device=weights.device)
    logits, ranks = temperatures is not None, first is not None
    variant = _draw_variant(weights.dtype, logits, ranks, _aligned(weights))
    # The kernel for probabilities does not read this argument; any pointer will do.
    at = keys if temperatures is None else temperatures
    tops = torch.empty(rows * DRAW_PARTS, dtype=torch.float32, device=weights.device)
    founds = torch.empty_like(tops, dtype=torch.int32)
    done = torch.zeros(rows, dtype=torch.int32, device=weights.device)
    arguments = (weights, weights.stride(0), at, keys, chosen, tops, founds, done, vocabulary)
    launch(variant, rows * DRAW_PARTS, *arguments, first or 0)
    return chosen


def mask(logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor, first: int) -> None:
    """Sampling.mask. A program for each block of a row's tokens, so that few rows keep the GPU
    busy; it reads the words and writes minus infinity, and reads no logit."""
    (masked, count), tokens = words.shape, logits.shape[1]
    blocks = -(-tokens // BLOCK)
    where = logits, logits.stride(0), rows, words, count
    launch(_mask_variant(logits.dtype), masked * blocks, *where, tokens, first, blocks)


def variants() -> Iterator[Variant]:
    """All variants that `score`, `draw` and `mask` launch."""
    for dtype in LOGITS:
        yield _mask_variant(dtype)
        for aligned in (False, True):
            for targets in (torch.int64, torch.float32):
                yield _score_variant(dtype, targets, aligned)
            yield _draw_variant(dtype, True, True, aligned)
            yield _draw_variant(dtype, True, False, aligned)
            yield _draw_variant(dtype, False, False, aligned)


def _aligned(rows: torch.Tensor) -> bool:
    """Whether each row is aligned for vector loads."""
    return not any(n % ALIGN for n in (rows.data_ptr(), rows.stride(0), rows.shape[1]))


def _score_variant(dtype: torch.dtype, targets: torch.dtype, aligned: bool) -> Variant:
    kinds = (f"*{TRITON_TYPES[dtype]}", "i32", f"*{TRITON_TYPES[targets]}")
    arguments = (*kinds, "*fp32", "*i32", "*fp32", "i32")
    constants = (("GIVEN", int(targets == torch.float32)), ("BLOCK", BLOCK))
    return Variant("score", arguments, (0, 1, 6) if aligned else (), constants, warps=WARPS)


def _draw_variant(dtype: torch.dtype, logits: bool, ranks: bool, aligned: bool) -> Variant:
    temperatures = "*fp32" if logits else "*i64"
    rows = (f"*{TRITON_TYPES[dtype]}", "i32", temperatures, "*i64", "*i64")
    arguments = (*rows, "*fp32", "*i32", "*i32", "i32", "i32")
    constants = {"LOGITS": int(logits), "MERGED": int(ranks), "BLOCK": BLOCK, "PARTS": DRAW_PARTS}
    where = (0, 1, 8) if aligned else ()
    return Variant("draw", arguments, where, tuple(constants.items()), warps=WARPS)


def _mask_variant(dtype: torch.dtype) -> Variant:
    arguments = (f"*{TRITON_TYPES[dtype]}", "i32", "*i64", "*i32", "i32", "i32", "i32", "i32")
    return Variant("mask", arguments, (), (("BLOCK", BLOCK),), warps=MASK_WARPS)
