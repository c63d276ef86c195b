"""What kernels read of a step, as arrays in host memory: the rows and pages of each sequence, and
how tokens are drawn. Each backend converts them for its kernels. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvline_server.memory.pages import PAGE_SIZE

NO_TOKEN = -1  # the result for a row whose logits are not finite
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

    def apart(self, of: np.ndarray, later: np.ndarray) -> GroupLayout:
        """Layout.apart, with the sequence `of` each row of a decode, and how many of its rows come
        `later`; both [rows of decodes]."""
        decodes = of[-1] + 1
        lengths = self.lengths[of] - later
        held = -(-lengths // PAGE_SIZE)
        begins, first = starts(held), self.page_starts[decodes]
        own = np.arange(begins[-1]) + np.repeat(self.page_starts[of] - begins[:-1], held)
        return replace(
            self,
            lengths=np.concatenate((lengths, self.lengths[decodes:])),
            page_starts=np.concatenate(
                (begins, self.page_starts[decodes + 1 :] - first + begins[-1])
            ),
            pages=np.concatenate((self.pages[own], self.pages[first:])),
        )


@dataclass(frozen=True, slots=True)
class Snapshots:
    """Copies of states that a step makes in passing, for prefixes that may come again."""

    sequences: NDArray[np.int64]  # [snapshots], whose, as indices in the layout
    rows: NDArray[np.int64]  # of the sequence in this step, behind which; CHUNK or a multiple of it
    slots: NDArray[np.int64]  # to be written


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Slots of the recurrent states of each sequence (kernels/recurrent.Sequences)."""

    slots: NDArray[np.int64]  # [sequences], written; DUMMY for padding
    sources: NDArray[np.int64]  # [sequences], read; DUMMY: none, it starts from zero
    snapshots: Snapshots | None = None


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Rows of images whose positions differ by axis."""

    rows: NDArray[np.int64]  # [n], of the step
    times: NDArray[np.int64]  # [n]
    heights: NDArray[np.int64]  # [n]
    widths: NDArray[np.int64]  # [n]


@dataclass(frozen=True, slots=True)
class Layout:
    """Sequences in the order of their rows, decodes first: one row each, and draft tokens'."""

    decodes: int  # sequences
    row_starts: NDArray[np.int32]  # [sequences + 1]
    positions: NDArray[np.int32]  # [rows], by which they are rotated
    groups: tuple[GroupLayout, ...]
    states: StateLayout | None = None  # of a model with recurrent layers
    images: ImageRows | None = None

    @property
    def sequences(self) -> int:
        return len(self.row_starts) - 1

    @property
    def rows(self) -> int:
        return int(self.row_starts[-1])

    @property
    def decode_rows(self) -> int:
        return int(self.row_starts[self.decodes])

    def apart(self) -> Layout:
        """With each row of a decode as a sequence of its own, of one token more than the row before
        it: what a query may see then follows from the length alone, for kernels of one query. For
        attention alone: a state goes on from row to row."""
        rows = self.decode_rows
        if rows == self.decodes:
            return self
        of = np.repeat(np.arange(self.decodes), np.diff(self.row_starts[: self.decodes + 1]))
        each = np.arange(rows, dtype=np.int32)
        later = self.row_starts[of + 1] - 1 - each  # rows of its sequence behind each
        return replace(
            self,
            decodes=rows,
            row_starts=np.concatenate((each, self.row_starts[self.decodes :])),
            groups=tuple(group.apart(of, later) for group in self.groups),
            states=None,
        )


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
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

    def between(self, first: int, last: int) -> SamplingMetadata:
        return self.at(slice(first, last))

    def at(self, rows: slice | np.ndarray) -> SamplingMetadata:
        return SamplingMetadata(
            self.temperatures[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.keys[rows],
        )


def starts(counts: np.ndarray) -> NDArray[np.int32]:
    """Where each of so many entries begin, and where the last ones end. -> [counts + 1]"""
    out = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=out[1:])
    return out
