"""A step's rows by sequence, and where their keys and values lie: what attention needs to know.

Numbers on the host; each backend turns them into what its kernels take.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Layout:
    """Sequences in the order of their rows; the first `decodes` have one row each."""

    decodes: int
    row_starts: np.ndarray  # int32 [sequences + 1]
    lengths: np.ndarray  # int32 [sequences], tokens in the cache once this step's are there
    page_starts: np.ndarray  # int32 [sequences + 1], into pages
    pages: np.ndarray  # int32 [pages of all sequences]
    positions: np.ndarray  # int32 [rows]
    slots: np.ndarray  # int64 [rows], where each row's key and value go

    @property
    def sequences(self) -> int:
        return len(self.lengths)

    @property
    def rows(self) -> int:
        return int(self.row_starts[-1])
