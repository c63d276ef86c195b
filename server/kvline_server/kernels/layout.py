"""The metadata of attention: a step's rows by sequence, and the pages of each sequence.

Arrays in host memory; each backend converts them for its kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


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
