"""Logprobs and sampling in plain torch.

Scores in blocks of a fixed row count, like the LM head, because the result of a reduction may
depend on its row count.
"""

from __future__ import annotations

import numpy as np
import torch

from kvline_server.kernels.interface import LOGIT_BLOCK, NO_TOKEN, RowScores
from kvline_server.kernels.layout import GREEDY, Draws
from kvline_server.kernels.noise import gumbel_max


def score_rows(logits: torch.Tensor, targets: torch.Tensor, top: int) -> RowScores:
    """Kernels.score. logits float32 [rows, vocabulary], targets int64 [rows]"""
    rows, vocabulary = logits.shape
    top = min(top, vocabulary)
    out = RowScores(
        values=logits.new_empty(rows, dtype=torch.float32),
        ranks=logits.new_empty(rows, dtype=torch.int32),
        top_ids=logits.new_empty((rows, top), dtype=torch.int32),
        top_values=logits.new_empty((rows, top), dtype=torch.float32),
    )
    for start in range(0, rows, LOGIT_BLOCK):
        end = min(start + LOGIT_BLOCK, rows)
        _score_block(logits[start:end], targets[start:end], top, out, start)
    return out


def _score_block(
    logits: torch.Tensor, targets: torch.Tensor, top: int, out: RowScores, start: int
) -> None:
    count = logits.shape[0]
    if count < LOGIT_BLOCK:
        logits = torch.cat((logits, logits[-1:].expand(LOGIT_BLOCK - count, -1)))
        targets = torch.cat((targets, targets[-1:].expand(LOGIT_BLOCK - count)))
    normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)  # [block, 1]
    chosen = logits.gather(1, targets.unsqueeze(1))
    end = start + count
    out.values[start:end] = (chosen - normaliser)[:count, 0]
    out.ranks[start:end] = ((logits > chosen).sum(dim=-1) + 1)[:count]
    if top:
        values, ids = logits.topk(top, dim=-1)
        out.top_ids[start:end] = ids[:count]
        out.top_values[start:end] = (values - normaliser)[:count]


def choose_rows(logits: torch.Tensor, draws: Draws) -> torch.Tensor:
    chosen = logits.argmax(dim=-1)
    highest = logits.gather(1, chosen.unsqueeze(1))  # NaN where a row has one
    drawn = np.flatnonzero(draws.temperatures >= GREEDY)
    if drawn.size:
        at = torch.from_numpy(drawn).to(logits.device)
        rows = logits if drawn.size == len(logits) else logits[at]
        chosen[at] = _draw(rows.sub_(highest[at]), draws, drawn)
    return torch.where(highest.squeeze(1).isfinite(), chosen, NO_TOKEN)


def _draw(logits: torch.Tensor, draws: Draws, drawn: np.ndarray) -> torch.Tensor:
    """logits [drawn, vocabulary], shifted to a maximum of 0 so that no temperature overflows"""
    scale = torch.from_numpy(draws.temperatures[drawn]).to(logits).unsqueeze(1)
    probabilities = torch.softmax(logits.div_(scale), dim=-1)
    for row, i in enumerate(drawn):
        if draws.top_k[i] or draws.top_p[i] < 1.0 or draws.min_p[i] > 0.0:
            limits = (int(draws.top_k[i]), float(draws.top_p[i]), float(draws.min_p[i]))
            _filter(probabilities[row], *limits)
    return gumbel_max(probabilities, draws.keys[drawn])


def _filter(probabilities: torch.Tensor, top_k: int, top_p: float, min_p: float) -> None:
    """Applies top-k, then top-p of the rest, then min-p, in place. [vocabulary]"""
    vocabulary = probabilities.shape[0]
    count = min(top_k, vocabulary) if top_k else vocabulary
    values, ids = probabilities.topk(count)
    keep = torch.ones_like(ids, dtype=torch.bool)
    if top_p < 1.0:
        before = values.cumsum(0) - values
        keep &= before < top_p * values.sum()
    if min_p > 0.0:
        keep &= values >= min_p * values[0]
    keep[0] = True
    kept = values * keep
    probabilities.zero_()
    probabilities[ids] = kept
