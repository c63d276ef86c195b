"""Rows of logits on a GPU: their scores and their next tokens, one program of a kernel a row."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kvline_server.kernels.cubins import TRITON_TYPES, Variant, launch

BLOCK, WARPS = 4096, 8
DRAW_BLOCK, DRAW_WARPS = 16384, 16  # few rows: each program must keep its processor busy alone
ALIGN = 16
LOGITS = (torch.bfloat16, torch.float32)


def score(
    logits: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probability and rank of each row's target, and log of the sum of exponentials.
    logits [rows, vocabulary], targets int64 [rows] -> float32, int32, float32 [rows]"""
    rows, vocabulary = logits.shape
    values = torch.empty(rows, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(rows, dtype=torch.int32, device=logits.device)
    normalisers = torch.empty_like(values)
    variant = _score_variant(logits.dtype, _aligned(logits))
    stride = logits.stride(0)
    launch(variant, rows, logits, stride, targets, values, ranks, normalisers, vocabulary)
    return values, ranks, normalisers


def draw(
    weights: torch.Tensor, keys: torch.Tensor, temperatures: torch.Tensor | None = None
) -> torch.Tensor:
    """A token a row: of logits at their temperatures, or of probabilities when there are none;
    NO_TOKEN where they are not finite or all 0.
    weights [rows, vocabulary]; keys int64, temperatures float32 [rows] -> int64 [rows]"""
    rows, vocabulary = weights.shape
    chosen = torch.empty(rows, dtype=torch.int64, device=weights.device)
    variant = _draw_variant(weights.dtype, temperatures is not None, _aligned(weights))
    # Probabilities have no temperatures, and their kernel reads none.
    at = keys if temperatures is None else temperatures
    launch(variant, rows, weights, weights.stride(0), at, keys, chosen, vocabulary)
    return chosen


def variants() -> Iterator[Variant]:
    """All that `score` and `draw` may ask for."""
    for dtype in LOGITS:
        for aligned in (False, True):
            yield _score_variant(dtype, aligned)
            yield _draw_variant(dtype, True, aligned)
            yield _draw_variant(dtype, False, aligned)


def _aligned(rows: torch.Tensor) -> bool:
    """Whether blocks of each row can be read in whole vectors."""
    return not any(n % ALIGN for n in (rows.data_ptr(), rows.stride(0), rows.shape[1]))


def _score_variant(dtype: torch.dtype, aligned: bool) -> Variant:
    arguments = (f"*{TRITON_TYPES[dtype]}", "i32", "*i64", "*fp32", "*i32", "*fp32", "i32")
    return Variant(
        "score", arguments, (0, 1, 6) if aligned else (), (("BLOCK", BLOCK),), warps=WARPS
    )


def _draw_variant(dtype: torch.dtype, logits: bool, aligned: bool) -> Variant:
    temperatures = "*fp32" if logits else "*i64"
    arguments = (f"*{TRITON_TYPES[dtype]}", "i32", temperatures, "*i64", "*i64", "i32")
    constants = (("LOGITS", int(logits)), ("BLOCK", DRAW_BLOCK))
    return Variant("draw", arguments, (0, 1, 5) if aligned else (), constants, warps=DRAW_WARPS)
