"""Builds the arrays of one step, and notes which sequences its results belong to."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from itertools import chain, islice, repeat
from operator import attrgetter

import numpy as np

from kvline_server.engine import penalties
from kvline_server.engine.request import Sequence
from kvline_server.engine.sampling import sampling_metadata
from kvline_server.engine.work import NO_DRAFTS, Kind, Work
from kvline_server.kernels.layout import GroupLayout, Layout, Snapshots, StateLayout, starts
from kvline_server.memory.caches import GroupPages, PageTable
from kvline_server.memory.pages import PAGE_SIZE
from kvline_server.worker.step import NO_CONSTRAINTS, NO_MASKS, Constraints, Step, TokenMasks


@dataclass(frozen=True, slots=True)
class ScoredRun:
    """Consecutive prompt positions of one sequence whose logprobs this step computes."""

    sequence: Sequence
    first: int  # prompt position of the first target
    count: int


@dataclass(frozen=True, slots=True)
class Batch:
    step: Step
    scored: tuple[ScoredRun, ...]
    sampled: list[Sequence]  # those that are, in the order of their rows
    drafts: list[Items[int]]  # of each of them; empty where none has any
    counts: list[int]  # sampled rows of each

    def split(self, tokens: list[int]) -> list[list[int]]:
        """Those of each, of one token a sampled row."""
        each = iter(tokens)
        return [list(islice(each, count)) for count in self.counts]


def build(work: list[Work], cleared: Iterable[Collection[int]] = ()) -> Batch:
    """The step of this work, whose sequences already hold their pages. Pages to be `cleared` before
    it, of each group, may be any."""
    rows = Rows(work)
    return rows.batch(cleared, rows.constraints())


class Rows:
    """The rows of some work that the LM head gets, and what is done with each. `sampled` are the
    sequences that are, in the order of their rows, and `drafts` those of each, empty where none has
    any."""

    def __init__(self, work: list[Work]) -> None:
        decode = Kind.DECODE
        decodes = [w for w in work if w.kind is decode]
        drafting = any(map(attrgetter("drafts"), decodes))
        if drafting:  # those of as many rows are attended together
            decodes.sort(key=attrgetter("rows"))
        prompts = [w for w in work if w.kind is not decode] if len(decodes) < len(work) else []
        self.decodes, self.prompts, self.drafting = decodes, prompts, drafting
        # Decodes are the step's first rows, each of which is sampled.
        self.count = sum(w.rows for w in decodes) if drafting else len(decodes)
        self.scored_rows: list[np.ndarray] = []
        self.targets: list[int] = []
        self.scored: list[ScoredRun] = []
        self.sampled_rows = list(range(self.count))
        self.sampled = [w.sequence for w in decodes]
        self.drafts = [w.drafts for w in decodes] if drafting else []
        for w in prompts:
            self._add(w)

    def _add(self, work: Work) -> None:
        """A prompt's rows, behind those before."""
        sequence, start, count, _, _ = work
        at, end = self.count, start + count
        self.count += count
        if start < sequence.prompt_length - 1:  # the row of position p predicts the token at p + 1
            first = max(start + 1, sequence.first_scored)
            last = min(end, sequence.prompt_length - 1)
            if first <= last:
                self.scored_rows.append(np.arange(at + first - 1 - start, at + last - start))
                self.targets += sequence.tokens[first : last + 1]
                self.scored.append(ScoredRun(sequence, first, last - first + 1))
        if end == len(sequence.tokens) + sequence.pending:
            self.sampled_rows.append(at + count - 1)
            self.sampled.append(sequence)
            if self.drafting:
                self.drafts.append(NO_DRAFTS)

    @property
    def constrained(self) -> bool:
        """Whether what a sequence may get depends on its last token."""
        return any(map(attrgetter("constrained"), self.sampled))

    @property
    def pending(self) -> bool:
        """Whether the last token of such a sequence is not read yet."""
        return any(s.pending for s in self.sampled if s.constrained)

    def constraints(self, masks: TokenMasks = NO_MASKS) -> Constraints:
        """With these masks, and the edits that follow from the tokens that have been read."""
        return Constraints(penalties.logits_edits(self._owners()), masks)

    def _owners(self) -> list[Sequence]:
        """Of each sampled row."""
        if not self.drafting:
            return self.sampled
        pairs = zip(self.sampled, self.drafts, strict=True)
        return [s for s, drafts in pairs for _ in range(1 + len(drafts))]

    def batch(
        self, cleared: Iterable[Collection[int]], constraints: Constraints = NO_CONSTRAINTS
    ) -> Batch:
        decodes, prompts, sampled = self.decodes, self.prompts, self._owners()
        tokens = _token_ids(decodes, prompts, self.drafting)
        single = 0 if self.drafting else len(decodes)
        layout = _layout(decodes + prompts, single, len(decodes), cleared)
        ahead: np.ndarray | int = 0
        counts = [1 + len(drafts) for drafts in self.drafts] or [1] * len(sampled)
        if self.drafting:
            ahead = np.concatenate([np.arange(n, dtype=np.uint64) for n in counts])
        requests = np.asarray([s.request_index for s in sampled], dtype=np.int64)
        # Only a sampled row can have an input token that the host has not read.
        pending = [i for i, s in enumerate(sampled) if s.pending]
        listed = [row for row, s in enumerate(sampled) if s.params.logprobs is not None]
        sampled_rows = np.asarray(self.sampled_rows, dtype=np.int64)
        step = Step(
            tokens=tokens,
            layout=layout,
            pending_rows=sampled_rows[pending],
            pending_requests=requests[pending],
            logits_indices=np.concatenate([*self.scored_rows, sampled_rows]).astype(np.int64),
            targets=np.asarray(self.targets, dtype=np.int64),
            scored_top=max(
                (r.sequence.params.prompt_logprobs or 0 for r in self.scored), default=0
            ),
            sampled_requests=requests,
            sampling_metadata=sampling_metadata(sampled, ahead),
            listed=np.asarray(listed, dtype=np.int64),
            listed_top=max((sampled[row].params.logprobs or 0 for row in listed), default=0),
            constraints=constraints,
        )
        return Batch(step, tuple(self.scored), self.sampled, self.drafts, counts)


def decode_layout(
    firsts: Items[tuple[Sequence, int]], cleared: Iterable[Collection[int]] = ()
) -> Layout:
    """Of a row of each of these sequences, at this position; without recurrent states."""
    work = [Work(sequence, position, 1, Kind.DECODE) for sequence, position in firsts]
    return replace(_layout(work, len(work), len(work), cleared), states=None)


def _token_ids(decodes: list[Work], prompts: list[Work], drafting: bool) -> np.ndarray:
    """A pending token is filled in on the device."""
    known = [s.tokens[start] if start < len(s.tokens) else 0 for s, start, _, _, _ in decodes]
    if drafting:
        known = [t for one, w in zip(known, decodes, strict=True) for t in (one, *w.drafts)]
    parts = [np.asarray(s.tokens[start : start + count]) for s, start, count, _, _ in prompts]
    return np.concatenate([np.asarray(known, dtype=np.int64), *parts]).astype(np.int64)


def _layout(
    work: list[Work], single: int, decodes: int, cleared: Iterable[Collection[int]]
) -> Layout:
    """Of work that begins with `single` rows."""
    counts = np.ones(len(work), dtype=np.int32)
    counts[single:] = [w.rows for w in work[single:]]
    first = np.asarray([w.start for w in work], dtype=np.int32)
    row_starts = starts(counts)
    positions, repeats = first, None
    if len(work) != single:
        # Row r of sequence s is at position first[s] + (r - row_starts[s]).
        rows, repeats = np.arange(row_starts[-1], dtype=np.int32), counts
        positions = rows + np.repeat(first - row_starts[:-1], counts)
    lengths, tables = first + counts, [w.sequence.table for w in work]
    groups = [
        _group(
            [table.groups[at] for table in tables],
            lengths,
            positions,
            repeats,
            np.asarray(pages, dtype=np.int64),
        )
        for at, pages in zip(range(len(tables[0].groups)), chain(cleared, repeat(())), strict=False)
    ]
    return Layout(decodes, row_starts, positions, tuple(groups), _states(tables, decodes))


def _states(tables: list[PageTable], decodes: int) -> StateLayout | None:
    """Of each sequence, where the model has recurrent layers."""
    if not tables or tables[0].step is None:
        return None
    steps = [table.step for table in tables if table.step is not None]
    kept = [(at, *each) for at, step in enumerate(steps) for each in step.snapshots]
    of = np.asarray(kept, dtype=np.int64).reshape(-1, 3)
    each = None
    if any(step.each for step in steps[:decodes]):
        written = [slot for step in steps[:decodes] for slot in step.each or (step.slot,)]
        each = np.asarray(written, dtype=np.int64)
    return StateLayout(
        slots=np.asarray([step.slot for step in steps], dtype=np.int64),
        sources=np.asarray([step.source for step in steps], dtype=np.int64),
        snapshots=Snapshots(of[:, 0], of[:, 1], of[:, 2]) if kept else None,
        each=each,
    )


def _group(
    held: list[GroupPages],
    lengths: np.ndarray,
    positions: np.ndarray,
    repeats: np.ndarray | None,
    cleared: np.ndarray,
) -> GroupLayout:
    """Of each sequence's pages and tokens. `repeats` are the rows of each; None: one, the common
    case."""
    firsts = [each.first for each in held]
    if any(firsts):
        behind = np.asarray(firsts, dtype=np.int32)
        lengths = lengths - behind * PAGE_SIZE
        positions = positions - PAGE_SIZE * (behind if repeats is None else behind.repeat(repeats))
    counts = -(-lengths // PAGE_SIZE)
    own = [each.pages for each in held]
    tables = [
        table if len(table) == count else table[:count]
        for table, count in zip(own, counts.tolist(), strict=True)
    ]
    pages = np.frombuffer(bytearray().join(tables), dtype=np.int32)
    page_starts = starts(counts)
    if repeats is None:
        page = pages[page_starts[1:] - 1]
    else:
        page = pages[page_starts[:-1].repeat(repeats) + positions // PAGE_SIZE]
    slots = page.astype(np.int64) * PAGE_SIZE + positions % PAGE_SIZE
    return GroupLayout(lengths, page_starts, pages, slots, cleared)
