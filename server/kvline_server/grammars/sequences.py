"""Matchers of the sequences that follow a grammar, and the masks of their next tokens.

All is done on one thread, but that masks of sequences with different lexers are filled on several.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from kvline_server.grammars.cache import Entry, Lexer
from kvline_server.grammars.compiled import NOTHING, GrammarRefused, compiled, reason_of
from kvline_server.grammars.messages import Begin, Filled, Wanted
from kvline_server.grammars.vocabulary import Vocabulary
from kvline_server.options.grammars import FILL_SECONDS, MASK_SECONDS, GrammarBounds

SLOW_SECONDS = 2 * MASK_SECONDS  # for all masks of a step, after which each is timed
AT_ONCE = 8  # masks of one lexer in a call
UNKNOWN = "its grammar is not known any more"
SLOW = "the next masks of its grammar take too long"
MOST_BREAKS = 3  # lexers that are made anew in a step for sequences that shared one
Rows = NDArray[np.int32]  # [rows, words]


@dataclass(eq=False, slots=True)
class Sequence:
    id: int
    entry: Entry
    lexer: Lexer
    matcher: LLMatcher
    tokens: array[int] = field(default_factory=lambda: array("i"))  # that the matcher has had

    def take(self, tokens: list[int]) -> None:
        """Its new tokens."""
        if tokens:
            self.tokens.extend(tokens)
            self.matcher.consume_tokens(tokens)

    def replay(self, lexer: Lexer) -> None:
        """Its tokens, with another lexer."""
        self.lexer.sequences -= 1
        lexer.sequences += 1
        self.lexer, self.matcher = lexer, lexer.start.deep_copy()
        self.matcher.consume_tokens(self.tokens.tolist())


class Job(NamedTuple):
    """Masks of a sequence."""

    sequence: Sequence
    row: int  # of the first; one behind each of the drafts follows
    drafts: list[int]

    @property
    def matcher(self) -> LLMatcher:
        return self.sequence.matcher


class Sequences:
    def __init__(self, vocabulary: Vocabulary, bounds: GrammarBounds) -> None:
        self.vocabulary, self.bounds = vocabulary, bounds
        self.begun: dict[int, Sequence] = {}
        self._one, self._several = LLExecutor(1), LLExecutor(bounds.threads)
        self._timing = False  # each mask of the next step

    def begin(self, asked: Begin, entry: Entry) -> None:
        lexer = entry.least()
        lexer.sequences += 1
        matcher = lexer.start.deep_copy()
        self.begun[asked.sequence] = Sequence(asked.sequence, entry, lexer, matcher)

    def end(self, id: int) -> None:
        sequence = self.begun.pop(id, None)
        if sequence is not None:
            sequence.lexer.sequences -= 1

    def clear(self) -> None:
        for id in list(self.begun):
            self.end(id)

    def fill(self, step: int, wanted: list[Wanted], rows: Rows) -> Filled:
        """The masks of a step, and what came of the sequences. Those that failed have ended."""
        failed: dict[int, str] = {}
        jobs: list[Job] = []
        for each in wanted:
            sequence = self.begun.get(each.sequence)
            if sequence is None:
                failed[each.sequence] = UNKNOWN
                continue
            sequence.take(each.tokens)
            if each.drafts:  # those behind one that is not allowed get no mask
                self._allow(each, rows)
            jobs.append(Job(sequence, each.row, each.drafts))
        failed |= self._fill(jobs, rows)
        for each in wanted:
            if each.sequence in failed:
                self._allow(each, rows)
                self.end(each.sequence)
        stopped = [job.sequence.id for job in jobs if job.matcher.is_stopped()]
        finished = [id for id in stopped if id not in failed]
        return Filled(step, finished, list(failed.items()))

    def _allow(self, wanted: Wanted, rows: Rows) -> None:
        """Everything: a row without any token would have none to sample."""
        rows[wanted.row : wanted.row + 1 + len(wanted.drafts)] = self.vocabulary.everything

    def _fill(self, jobs: list[Job], rows: Rows) -> dict[int, str]:
        """-> sequences that failed, and why"""
        began = time.monotonic()
        left = jobs if self._timing else self._at_once(jobs, rows, began + SLOW_SECONDS)
        failed = self._one_by_one(left, rows, began + FILL_SECONDS)
        self._timing = not self._timing and time.monotonic() - began > SLOW_SECONDS
        broken = [job for job in jobs if job.matcher.is_error()]
        if broken:
            failed |= self._recover(broken, rows)
        if self.vocabulary.is_restricted:
            failed |= self._restrict([job for job in jobs if job.sequence.id not in failed], rows)
        return failed

    def _at_once(self, jobs: list[Job], rows: Rows, until: float) -> list[Job]:
        """In calls of a few masks of each lexer, since a call cannot be interrupted; those of
        grammars that were slow come last. -> what is left when time.monotonic() is `until`"""
        left = [list(some) for _, some in groupby(sorted(jobs, key=_lexer), key=_lexer)]
        left.sort(key=lambda some: some[0].sequence.entry.seconds)
        while left and time.monotonic() < until:
            some, rest = list[Job](), list[list[Job]]()
            for each in left:
                count = AT_ONCE if len(some) < self.bounds.threads * AT_ONCE else 0
                some += each[:count]
                if each[count:]:
                    rest.append(each[count:])
            self._compute(some, rows)
            left = rest
        return [job for each in left for job in each]

    def _compute(self, jobs: list[Job], rows: Rows) -> None:
        """Those of one lexer follow each other: they would wait for one another."""
        one = jobs[0].sequence.lexer is jobs[-1].sequence.lexer
        executor, where = self._one if one else self._several, (rows.ctypes.data, rows.strides[0])
        plain = [(job.matcher, job.row) for job in jobs if not job.drafts]
        drafting = [(job.matcher, job.row, job.drafts) for job in jobs if job.drafts]
        if plain:
            executor.unsafe_compute_mask_ptr(plain, *where, len(rows))
        if drafting:
            executor.unsafe_compute_mask_ptr_with_draft_token(drafting, *where, len(rows))

    def _one_by_one(self, jobs: list[Job], rows: Rows, until: float) -> dict[int, str]:
        """In or after a slow step, those of the fastest grammar first: whose masks are slow has
        failed, and so has who is left when time.monotonic() is `until`."""
        left: dict[Entry, list[Job]] = {}
        for job in jobs:
            left.setdefault(job.sequence.entry, []).append(job)
        slow = {}
        while left and time.monotonic() < until:
            entry = min(left, key=lambda each: each.seconds)
            job = left[entry].pop(0)
            if not left[entry]:
                del left[entry]
            began = time.thread_time()
            self._compute([job], rows)
            entry.seconds = (time.thread_time() - began) / (1 + len(job.drafts))
            if entry.seconds > MASK_SECONDS:
                slow[job.sequence.id] = SLOW
        return slow | {job.sequence.id: SLOW for some in left.values() for job in some}

    def _recover(self, broken: list[Job], rows: Rows) -> dict[int, str]:
        """A lexer that is in error for one sequence is so for all that share it. They replay their
        tokens with a new one, long texts last; who breaks that one too has failed, and the others
        replay once more."""
        failed: dict[int, str] = {}
        why = {job.sequence.id: reason_of(job.matcher) for job in broken}
        for _, some in groupby(sorted(broken, key=_lexer), key=_lexer):
            left = sorted(some, key=lambda job: len(job.sequence.tokens))
            for _ in range(MOST_BREAKS):
                breaker = self._replay(left, rows)
                if breaker is None:
                    left = []
                    break
                failed[breaker.sequence.id] = why[breaker.sequence.id]
                left.remove(breaker)
            failed |= {job.sequence.id: why[job.sequence.id] for job in left}
        return failed

    def _replay(self, jobs: list[Job], rows: Rows) -> Job | None:
        """With a new lexer in the place of theirs. -> the first that breaks it"""
        if not jobs:
            return None
        entry, old = jobs[0].sequence.entry, jobs[0].sequence.lexer
        entry.lexers = [lexer for lexer in entry.lexers if lexer is not old]
        try:
            new = Lexer(compiled(entry.grammar, self.vocabulary, self.bounds.lexer_states))
        except GrammarRefused:
            return jobs[0]
        entry.lexers.append(new)
        for job in jobs:
            job.sequence.replay(new)
            if not job.matcher.is_error():
                self._compute([job], rows)
            if job.matcher.is_error():
                return job
        return None

    def _restrict(self, jobs: list[Job], rows: Rows) -> dict[int, str]:
        """To tokens of the model. At a grammar's end, where none of them ends an answer, any may
        be sampled: it is finished."""
        failed = {}
        for job in jobs:
            for row in rows[job.row : job.row + 1 + len(job.drafts)]:
                if not self.vocabulary.restrict(row):
                    row[:] = self.vocabulary.everything
                    if not job.drafts and not job.matcher.is_stopped():
                        failed[job.sequence.id] = NOTHING
        return failed


def _lexer(job: Job) -> int:
    return id(job.sequence.lexer)
