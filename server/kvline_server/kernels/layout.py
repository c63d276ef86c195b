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

    def cut(self, of: np.ndarray, later: np.ndarray) -> GroupLayout:
        """Parts of sequences as sequences: whose each is, and how many of the sequence's rows come
        `later`; both [parts]."""
        lengths = self.lengths[of] - later
        held = -(-lengths // PAGE_SIZE)
        begins = starts(held)
        own = np.arange(begins[-1]) + np.repeat(self.page_starts[of] - begins[:-1], held)
        return replace(self, lengths=lengths, page_starts=begins, pages=self.pages[own])


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
    # [decode rows], written behind each of them where some are draft tokens, so that a sequence can
    # go on behind any; None: none is.
    each: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Rows of images whose positions differ by axis."""

    rows: NDArray[np.int64]  # [n], of the step
    times: NDArray[np.int64]  # [n]
    heights: NDArray[np.int64]  # [n]
    widths: NDArray[np.int64]  # [n]


@dataclass(frozen=True, slots=True)
class Spans:
    """Rows with bidirectional attention among them: those of an image, where a model has that."""

    starts: NDArray[np.int32]  # [n], rows of the step, in order
    ends: NDArray[np.int32]  # [n]


@dataclass(frozen=True, slots=True)
class Layout:
    """Sequences in the order of their rows, decodes first: one row each, and draft tokens'."""

    decodes: int  # sequences
    row_starts: NDArray[np.int32]  # [sequences + 1]
    positions: NDArray[np.int32]  # [rows], by which they are rotated
    groups: tuple[GroupLayout, ...]
    states: StateLayout | None = None  # of a model with recurrent layers
    images: ImageRows | None = None
    spans: Spans | None = None  # of prompts; none is in two sequences

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
        each = np.arange(rows, dtype=np.int32)
        made = self._cut(np.concatenate((each, self.row_starts[self.decodes :])))
        return replace(made, decodes=rows)

    def whole(self) -> tuple[Layout, NDArray[np.bool_]]:
        """With each span as a sequence of its own, and the rows before, between and behind spans as
        others: what a query may see then follows from its sequence's length, where those of spans
        are not causal. So kernels need no mask for them; a window bounds what is before a query in
        both. For attention alone. -> and which sequences are spans, [sequences]"""
        if self.spans is None:
            return self, np.zeros(self.sequences, np.bool_)
        every = np.concatenate((self.row_starts, self.spans.starts, self.spans.ends))
        made = self._cut(np.unique(every).astype(np.int32))
        return made, np.isin(made.row_starts[:-1], self.spans.starts)

    def by_kind(self) -> tuple[Layout, int, NDArray[np.int64]]:
        """`whole`, for kernels that run one kind of sequences: decodes, then all others that are
        causal, then spans, each kind's rows beside each other. For attention alone. -> and how many
        are no spans, and which of this layout's rows each row is, [rows]"""
        made, spans = self.whole()
        spans[: self.decodes] = False  # of one row, which is the last that it sees
        order = np.argsort(spans, kind="stable")
        counts = np.diff(made.row_starts)[order]
        begins = starts(counts)
        rows = np.arange(self.rows) + np.repeat(made.row_starts[order] - begins[:-1], counts)
        groups = tuple(group.cut(order, np.zeros_like(begins[1:])) for group in made.groups)
        moved = replace(made, row_starts=begins, groups=groups, spans=None)
        return moved, int(np.count_nonzero(~spans)), rows

    def _cut(self, row_starts: NDArray[np.int32]) -> Layout:
        """With sequences that begin and end at these rows, all of its own among them."""
        of = np.searchsorted(self.row_starts, row_starts[:-1], side="right") - 1
        later = self.row_starts[of + 1] - row_starts[1:]
        groups = tuple(group.cut(of, later) for group in self.groups)
        return replace(self, row_starts=row_starts, groups=groups, states=None)


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


def greedy(rows: int) -> SamplingMetadata:
    """Of rows whose best token is taken."""
    zeros = np.zeros(rows, np.float32)
    return SamplingMetadata(
        temperatures=zeros,
        top_k=np.zeros(rows, np.int32),
        top_p=zeros + 1,
        min_p=zeros,
        keys=np.zeros(rows, np.uint64),
    )


def starts(counts: np.ndarray) -> NDArray[np.int32]:
    """Where each of so many entries begin, and where the last ones end. -> [counts + 1]"""
    out = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=out[1:])
    return out
