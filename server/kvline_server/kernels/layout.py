"""What kernels read of a step, as arrays in host memory: the rows and pages of each sequence, and
how tokens are drawn. Each backend converts them for its kernels. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

GREEDY = 1e-5  # lower temperatures mean argmax; dividing by them would overflow


@dataclass(frozen=True, slots=True)
class Layout:
    """Sequences in the order of their rows; the first `decodes` have one row each."""

    decodes: int
    row_starts: np.ndarray  # int32 [sequences + 1]
    lengths: np.ndarray  # int32 [sequences], tokens in the cache after this step
    page_starts: np.ndarray  # int32 [sequences + 1], indices into pages
    pages: np.ndarray  # int32 [pages of all sequences]
    positions: np.ndarray  # int32 [rows]
    slots: np.ndarray  # int64 [rows], cache slots of their keys and values

    @property
    def sequences(self) -> int:
        return len(self.lengths)

    @property
    def rows(self) -> int:
        return int(self.row_starts[-1])


@dataclass(frozen=True, slots=True)
class Draws:
    """Sampling parameters of each row."""

    temperatures: np.ndarray  # float32 [rows]; argmax below GREEDY
    top_k: np.ndarray  # int32 [rows], 0: off
    top_p: np.ndarray  # float32 [rows], 1: off
    min_p: np.ndarray  # float32 [rows], 0: off
    keys: np.ndarray  # uint64 [rows], seeds of the noise

    @property
    def filtered(self) -> np.ndarray:
        """Which rows have a filter that matters. bool [rows]"""
        filters = (self.top_k > 0) | (self.top_p < 1.0) | (self.min_p > 0.0)
        made: np.ndarray = (self.temperatures >= GREEDY) & filters
        return made

    def between(self, first: int, last: int) -> Draws:
        return self.at(slice(first, last))

    def at(self, rows: slice | np.ndarray) -> Draws:
        columns = (self.temperatures, self.top_k, self.top_p, self.min_p, self.keys)
        return Draws(*(column[rows] for column in columns))
