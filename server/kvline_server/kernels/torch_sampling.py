"""Logprobs and sampling in plain torch.

Scores in blocks of a fixed row count, like the LM head, because the result of a reduction may
depend on its row count.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from kvline_server.kernels.best import ordered
from kvline_server.kernels.layout import GREEDY, NO_TOKEN, SamplingMetadata
from kvline_server.kernels.noise import CPU_NUMBERS, exponential, gumbel_max
from kvline_server.kernels.sampling import (
    LOGIT_BLOCK,
    RowScores,
    Sampling,
    ShardScores,
)


class TorchSampling(Sampling):
    def mask(
        self, logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor, first: int
    ) -> None:
        tokens, shifts = logits.shape[1], torch.arange(8, dtype=torch.uint8, device=logits.device)
        # One row after the other: all bits as bytes of their own would be memory beside the logits.
        for row, own in zip(rows.tolist(), words, strict=True):
            bits = (own.view(torch.uint8).unsqueeze(1) >> shifts) & 1
            forbidden = bits.view(-1)[first : first + tokens] == 0
            logits[row].masked_fill_(forbidden, -math.inf)

    def score(self, logits: torch.Tensor, targets: torch.Tensor, top: int) -> RowScores:
        chosen = logits.gather(1, targets.unsqueeze(1)).squeeze(1)
        part = self.shard_scores(logits, chosen, top)
        return RowScores(
            values=chosen - part.normalisers,
            ranks=part.above + 1,
            top_ids=part.top_ids,
            top_values=part.top_logits - part.normalisers.unsqueeze(1),
        )

    def shard_scores(self, logits: torch.Tensor, chosen: torch.Tensor, top: int) -> ShardScores:
        rows, tokens = logits.shape
        top = min(top, tokens)
        out = ShardScores(
            normalisers=logits.new_empty(rows, dtype=torch.float32),
            above=logits.new_empty(rows, dtype=torch.int32),
            top_ids=logits.new_empty((rows, top), dtype=torch.int32),
            top_logits=logits.new_empty((rows, top), dtype=torch.float32),
        )
        for start in range(0, rows, LOGIT_BLOCK):
            end = min(start + LOGIT_BLOCK, rows)
            _score_block(logits[start:end], chosen[start:end], top, out, start)
        return out

    def best(self, logits: torch.Tensor, metadata: SamplingMetadata, first: int) -> torch.Tensor:
        rows, tokens = logits.shape
        made = torch.empty(rows, dtype=torch.int64, device=logits.device)
        step = max(1, CPU_NUMBERS // tokens)
        for start in range(0, rows, step):
            part = slice(start, start + step)
            some = metadata.between(start, start + step)
            temperatures = torch.from_numpy(some.temperatures).to(logits.device, torch.float64)
            greedy = (temperatures < GREEDY).unsqueeze(1)
            # More digits than a logit's own, so that only the noise decides between near ones.
            scores = logits[part].double()
            drawn = scores / temperatures.unsqueeze(1) - exponential(some.keys, first, logits).log()
            scores = torch.where(greedy, scores, drawn)
            highest, at = scores.max(dim=-1)
            highest = torch.where(highest.isnan(), math.inf, highest).float()
            made[part] = ordered(highest, at + first)
        return made

    def choose(self, logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        chosen = logits.argmax(dim=-1)
        highest = logits.gather(1, chosen.unsqueeze(1))  # NaN where a row has one
        drawn = np.flatnonzero(metadata.temperatures >= GREEDY)
        if drawn.size:
            at = torch.from_numpy(drawn).to(logits.device)
            rows = logits if drawn.size == len(logits) else logits[at]
            chosen[at] = _draw(rows.sub_(highest[at]), metadata, drawn)
        return torch.where(highest.squeeze(1).isfinite(), chosen, NO_TOKEN)


def _score_block(
    logits: torch.Tensor, chosen: torch.Tensor, top: int, out: ShardScores, start: int
) -> None:
    count = logits.shape[0]
    if count < LOGIT_BLOCK:
        logits = torch.cat((logits, logits[-1:].expand(LOGIT_BLOCK - count, -1)))
        chosen = torch.cat((chosen, chosen[-1:].expand(LOGIT_BLOCK - count)))
    end = start + count
    out.normalisers[start:end] = torch.logsumexp(logits, dim=-1)[:count]
    out.above[start:end] = (logits > chosen.unsqueeze(1)).sum(dim=-1)[:count]
    if top:
        values, ids = logits.topk(top, dim=-1)
        out.top_ids[start:end] = ids[:count]
        out.top_logits[start:end] = values[:count]


def _draw(logits: torch.Tensor, metadata: SamplingMetadata, drawn: np.ndarray) -> torch.Tensor:
    """logits [drawn, vocabulary], shifted to a maximum of 0 so that no temperature overflows"""
    scale = torch.from_numpy(metadata.temperatures[drawn]).to(logits).unsqueeze(1)
    probabilities = torch.softmax(logits.div_(scale), dim=-1)
    for row, i in enumerate(drawn):
        if metadata.top_k[i] or metadata.top_p[i] < 1.0 or metadata.min_p[i] > 0.0:
            limits = (int(metadata.top_k[i]), float(metadata.top_p[i]), float(metadata.min_p[i]))
            _filter(probabilities[row], *limits)
    return gumbel_max(probabilities, metadata.keys[drawn])


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
