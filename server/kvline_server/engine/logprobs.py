"""Log-probabilities of given tokens and of the best alternatives, from raw logits.

Raw means before temperature, penalties and filters. Works on blocks of a fixed row count, like the
LM head, because a reduction's bits may depend on how many rows it runs over.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvline_server.engine.request import Scores


@dataclass(frozen=True, slots=True)
class RowScores:
    """Logprobs of some rows, as arrays on the host."""

    values: np.ndarray  # float32 [rows]
    ranks: np.ndarray  # int32 [rows]
    top_ids: np.ndarray  # int32 [rows, top]
    top_values: np.ndarray  # float32 [rows, top]

    def slice(self, start: int, end: int, top: int, tokens: np.ndarray) -> Scores:
        return Scores(
            tokens=tokens.astype(np.int32),
            values=self.values[start:end],
            ranks=self.ranks[start:end],
            top_ids=np.ascontiguousarray(self.top_ids[start:end, :top]),
            top_values=np.ascontiguousarray(self.top_values[start:end, :top]),
        )


def score_rows(
    logits: torch.Tensor,  # float32 [rows, vocabulary]
    targets: torch.Tensor,  # int64 [rows]
    top: int,
    block: int,
) -> RowScores:
    """Each row's logprob of its target, the target's rank, and its `top` best tokens."""
    rows, vocabulary = logits.shape
    top = min(top, vocabulary)
    out = RowScores(
        values=np.empty(rows, np.float32),
        ranks=np.empty(rows, np.int32),
        top_ids=np.empty((rows, top), np.int32),
        top_values=np.empty((rows, top), np.float32),
    )
    for start in range(0, rows, block):
        end = min(start + block, rows)
        _score_block(logits[start:end], targets[start:end], top, block, out, start)
    return out


def _score_block(
    logits: torch.Tensor, targets: torch.Tensor, top: int, block: int, out: RowScores, start: int
) -> None:
    have = logits.shape[0]
    if have < block:
        logits = torch.cat((logits, logits[-1:].expand(block - have, -1)))
        targets = torch.cat((targets, targets[-1:].expand(block - have)))
    normaliser = torch.logsumexp(logits, dim=-1, keepdim=True)  # [block, 1]
    chosen = logits.gather(1, targets.unsqueeze(1))
    end = start + have
    out.values[start:end] = (chosen - normaliser)[:have, 0].numpy()
    out.ranks[start:end] = ((logits > chosen).sum(dim=-1) + 1)[:have].numpy()
    if top:
        values, ids = logits.topk(top, dim=-1)
        out.top_ids[start:end] = ids[:have].numpy()
        out.top_values[start:end] = (values - normaliser)[:have].numpy()


def join(parts: list[Scores]) -> Scores:
    """Consecutive pieces of one sequence as one."""
    return Scores(
        tokens=np.concatenate([p.tokens for p in parts]),
        values=np.concatenate([p.values for p in parts]),
        ranks=np.concatenate([p.ranks for p in parts]),
        top_ids=np.concatenate([p.top_ids for p in parts]),
        top_values=np.concatenate([p.top_values for p in parts]),
    )
