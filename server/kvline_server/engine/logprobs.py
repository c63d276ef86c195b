"""From the kernels' tables of log-probabilities to each sequence's own."""

from __future__ import annotations

import numpy as np

from kvline_server.engine.request import Scores
from kvline_server.kernels.interface import RowScores


def cut(table: RowScores, start: int, end: int, top: int, tokens: np.ndarray) -> Scores:
    """Rows start..end of a table, which judge `tokens`, with `top` alternatives each."""
    return Scores(
        tokens=tokens.astype(np.int32),
        values=table.values[start:end],
        ranks=table.ranks[start:end],
        top_ids=np.ascontiguousarray(table.top_ids[start:end, :top]),
        top_values=np.ascontiguousarray(table.top_values[start:end, :top]),
    )


def stack(tables: list[RowScores]) -> RowScores:
    """Consecutive tables as one."""
    return RowScores(
        values=np.concatenate([t.values for t in tables]),
        ranks=np.concatenate([t.ranks for t in tables]),
        top_ids=np.concatenate([t.top_ids for t in tables]),
        top_values=np.concatenate([t.top_values for t in tables]),
    )


def join(parts: list[Scores]) -> Scores:
    """Consecutive pieces of one sequence as one."""
    return Scores(
        tokens=np.concatenate([p.tokens for p in parts]),
        values=np.concatenate([p.values for p in parts]),
        ranks=np.concatenate([p.ranks for p in parts]),
        top_ids=np.concatenate([p.top_ids for p in parts]),
        top_values=np.concatenate([p.top_values for p in parts]),
    )
