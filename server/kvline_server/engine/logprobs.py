"""Splits the tables of logprobs by sequence."""

from __future__ import annotations

import numpy as np

from kvline_server.engine.request import Scores
from kvline_server.worker.step import Table


def cut(table: Table, start: int, end: int, top: int, tokens: np.ndarray) -> Scores:
    """Rows start..end as the scores of `tokens`, with `top` alternatives each."""
    return Scores(
        tokens=tokens.astype(np.int32),
        values=table.values[start:end],
        ranks=table.ranks[start:end],
        top_ids=np.ascontiguousarray(table.top_ids[start:end, :top]),
        top_values=np.ascontiguousarray(table.top_values[start:end, :top]),
    )


def join(parts: list[Scores]) -> Scores:
    """Concatenates the scores of consecutive positions."""
    return Scores(
        tokens=np.concatenate([p.tokens for p in parts]),
        values=np.concatenate([p.values for p in parts]),
        ranks=np.concatenate([p.ranks for p in parts]),
        top_ids=np.concatenate([p.top_ids for p in parts]),
        top_values=np.concatenate([p.top_values for p in parts]),
    )
