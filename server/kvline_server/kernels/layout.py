"""What kernels read of a step, as arrays in host memory: the rows and pages of each sequence, and
how tokens are drawn. Each backend converts them for its kernels. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

GREEDY = 1e-5  # lower temperatures mean argmax; dividing by them would overflow


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """What a group of layers (memory/groups.py) has of each sequence. Where a window left pages
    behind, the tokens of the others are as a sequence of their own."""

    lengths: NDArray[np.int32]  # [sequences], tokens in their pages after this step
    page_starts: NDArray[np.int32]  # [sequences + 1], indices into pages
    pages: NDArray[np.int32]  # [pages of all sequences]
    slots: NDArray[np.int64]  # [rows], cache slots of their keys and values
    cleared: NDArray[np.int64]  # pages that are set to 0 before anything is written


@dataclass(frozen=True, slots=True)
class Layout:
    """Sequences in the order of their rows; the first `decodes` have one row each."""

    decodes: int
    row_starts: NDArray[np.int32]  # [sequences + 1]
    positions: NDArray[np.int32]  # [rows]
    groups: tuple[GroupLayout, ...]

    @property
    def sequences(self) -> int:
        return len(self.row_starts) - 1

    @property
    def rows(self) -> int:
        return int(self.row_starts[-1])


@dataclass(frozen=True, slots=True)
class Draws:
    """Sampling parameters of each row."""

    temperatures: NDArray[np.float32]  # [rows]; argmax below GREEDY
    top_k: NDArray[np.int32]  # [rows], 0: off
    top_p: NDArray[np.float32]  # [rows], 1: off
    min_p: NDArray[np.float32]  # [rows], 0: off
    keys: NDArray[np.uint64]  # [rows], seeds of the noise

    @property
    def filtered(self) -> np.ndarray:
        """Which rows have a filter that matters. bool [rows]"""
        filters = (self.top_k > 0) | (self.top_p < 1.0) | (self.min_p > 0.0)
        made: np.ndarray = (self.temperatures >= GREEDY) & filters
        return made

    def between(self, first: int, last: int) -> Draws:
        return self.at(slice(first, last))

    def at(self, rows: slice | np.ndarray) -> Draws:
        return Draws(
            self.temperatures[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.keys[rows],
        )
