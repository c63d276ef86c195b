"""Splits the kernels' tables of logprobs by sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvline_server.engine.request import Scores


@dataclass(frozen=True, slots=True)
class Table:
    """kernels.interface.RowScores, copied to the host."""

    values: np.ndarray  # float32 [rows]
    ranks: np.ndarray  # int32 [rows]
    top_ids: np.ndarray  # int32 [rows, top]
    top_values: np.ndarray  # float32 [rows, top]

    def cut(self, start: int, end: int, top: int, tokens: np.ndarray) -> Scores:
        """Rows start..end as the scores of `tokens`, with `top` alternatives each."""
        return Scores(
            tokens=tokens.astype(np.int32),
            values=self.values[start:end],
            ranks=self.ranks[start:end],
            top_ids=np.ascontiguousarray(self.top_ids[start:end, :top]),
            top_values=np.ascontiguousarray(self.top_values[start:end, :top]),
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
