"""Builds the arrays of one step, and notes which sequences its results belong to."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from kvline_server.engine import penalties
from kvline_server.engine.request import Sequence
from kvline_server.engine.sampling import draws
from kvline_server.engine.scheduler import Work
from kvline_server.kernels.layout import Layout
from kvline_server.memory.pages import PAGE_SIZE
from kvline_server.worker.step import Step


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
    sampled: tuple[Sequence, ...]  # one per sampled row, in order


def build(work: list[Work]) -> Batch:
    """The step of this work, whose sequences already hold their pages."""
    ordered = [w for w in work if w.count == 1] + [w for w in work if w.count > 1]
    rows, targets, scored, sampled = _select_rows(ordered)
    # Only a decode can have an unread input token, and decodes come first, one row each.
    pending = [row for row, w in enumerate(ordered) if w.start >= len(w.sequence.tokens)]
    listed = [row for row, s in enumerate(sampled) if s.params.logprobs is not None]
    step = Step(
        tokens=_token_ids(ordered),
        layout=_layout(ordered),
        pending_rows=np.asarray(pending, dtype=np.int64),
        pending_slots=np.asarray([ordered[row].sequence.slot for row in pending], dtype=np.int64),
        wanted=rows,
        targets=targets,
        scored_top=max((run.sequence.params.prompt_logprobs or 0 for run in scored), default=0),
        sampled_slots=np.asarray([s.slot for s in sampled], dtype=np.int64),
        draws=draws(sampled),
        edits=penalties.edits(sampled),
        listed=np.asarray(listed, dtype=np.int64),
        listed_top=max((sampled[row].params.logprobs or 0 for row in listed), default=0),
    )
    return Batch(step, tuple(scored), tuple(sampled))


def _token_ids(work: list[Work]) -> np.ndarray:
    out = np.empty(sum(w.count for w in work), dtype=np.int64)
    at = 0
    for w in work:
        known = w.sequence.tokens[w.start : w.start + w.count]
        out[at : at + w.count] = known or 0  # a pending token is filled in on the device
        at += w.count
    return out


def _layout(work: list[Work]) -> Layout:
    counts = np.asarray([w.count for w in work], dtype=np.int32)
    first = np.asarray([w.start for w in work], dtype=np.int32)
    lengths = first + counts
    held = -(-lengths // PAGE_SIZE)
    row_starts, page_starts = _starts(counts), _starts(held)
    pages = np.fromiter(
        itertools.chain.from_iterable(
            w.sequence.pages[:count] for w, count in zip(work, held, strict=True)
        ),
        dtype=np.int32,
        count=int(page_starts[-1]),
    )
    # Row r of sequence s is at position first[s] + (r - row_starts[s]).
    rows = np.arange(row_starts[-1], dtype=np.int32)
    positions = rows + np.repeat(first - row_starts[:-1], counts)
    page = pages[np.repeat(page_starts[:-1], counts) + positions // PAGE_SIZE]
    return Layout(
        decodes=int((counts == 1).sum()),
        row_starts=row_starts,
        lengths=lengths,
        page_starts=page_starts,
        pages=pages,
        positions=positions,
        slots=page.astype(np.int64) * PAGE_SIZE + positions % PAGE_SIZE,
    )


def _starts(counts: np.ndarray) -> np.ndarray:
    out = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=out[1:])
    return out


def _select_rows(
    work: list[Work],
) -> tuple[np.ndarray, np.ndarray, list[ScoredRun], list[Sequence]]:
    scored_rows: list[np.ndarray] = []
    targets: list[int] = []
    scored: list[ScoredRun] = []
    sampled_rows: list[int] = []
    sampled: list[Sequence] = []
    at = 0
    for w in work:
        # The row of position p predicts the token at p + 1.
        first = max(w.start + 1, w.sequence.first_scored)
        last = min(w.start + w.count, w.sequence.prompt_length - 1)
        if first <= last:
            scored_rows.append(np.arange(at + first - 1 - w.start, at + last - w.start))
            targets += w.sequence.tokens[first : last + 1]
            scored.append(ScoredRun(w.sequence, first, last - first + 1))
        if w.samples:
            sampled_rows.append(at + w.count - 1)
            sampled.append(w.sequence)
        at += w.count
    rows = np.concatenate([*scored_rows, np.asarray(sampled_rows, dtype=np.int64)])
    return rows.astype(np.int64), np.asarray(targets, dtype=np.int64), scored, sampled
