"""The next token of each sampled row: edits of its logits, then sampling in the kernels."""

from __future__ import annotations

import torch

from kvline_server.kernels.interface import Kernels
from kvline_server.kernels.layout import Draws
from kvline_server.worker.step import Edits


def sample(
    kernels: Kernels, logits: torch.Tensor, draws: Draws, edits: tuple[Edits, ...]
) -> torch.Tensor:
    """Token ids, one per row. May change `logits` in place. [rows, vocabulary] -> int64 [rows]"""
    for each in edits:
        apply(kernels, logits, each)
    return kernels.choose(logits, draws)


def apply(kernels: Kernels, logits: torch.Tensor, edits: Edits) -> None:
    """In place. logits [rows, vocabulary]"""
    if not len(edits.rows):
        return
    flat, vocabulary = logits.view(-1), logits.shape[1]
    pairs = edits.rows * vocabulary + edits.tokens
    at, factors, subtracted = kernels.upload(pairs, edits.factors, edits.subtracted)
    values = flat[at].float()
    values = torch.where(values > 0, values / factors, values * factors) - subtracted
    flat[at] = values.to(logits.dtype)
