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

SLOW_SECONDS = MASK_SECONDS / 2  # a mask; from there on those of its grammar are timed
AT_ONCE = 8  # masks of one lexer in a call, and those of draft tokens
UNKNOWN = "its grammar is not known any more"
SLOW = "its next mask takes too long"
NO_TIME = "the masks of a step take too long together, and those of its grammar are slow"
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

    @property
    def is_slow(self) -> bool:
        return self.sequence.entry.seconds > SLOW_SECONDS

    @property
    def masks(self) -> int:
        return 1 + len(self.drafts)


class Sequences:
    def __init__(self, vocabulary: Vocabulary, bounds: GrammarBounds) -> None:
        self.vocabulary, self.bounds = vocabulary, bounds
        self.begun: dict[int, Sequence] = {}
        self._one, self._several = LLExecutor(1), LLExecutor(bounds.threads)

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
        left = self._at_once(jobs, rows, began + FILL_SECONDS / 2)
        failed = self._one_by_one(left, rows, began + FILL_SECONDS)
        broken = [job for job in jobs if job.matcher.is_error()]
        if broken:
            failed |= self._recover(broken, rows)
        if self.vocabulary.is_restricted:
            failed |= self._restrict([job for job in jobs if job.sequence.id not in failed], rows)
        return failed

    def _at_once(self, jobs: list[Job], rows: Rows, until: float) -> list[Job]:
        """Those of grammars not known to be slow. A call cannot be interrupted, so it has a few
        masks of each lexer. -> what is left when time.monotonic() is `until`"""
        slow = [job for job in jobs if job.is_slow]
        fast = sorted((job for job in jobs if not job.is_slow), key=_lexer)
        left = [list(some) for _, some in groupby(fast, key=_lexer)]
        left.sort(key=lambda some: some[0].sequence.entry.seconds)
        while left and (began := time.monotonic()) < until:
            some, rest, most = list[Job](), list[list[Job]](), 0
            for each in left:
                count = masks = 0
                if len(some) < self.bounds.threads * AT_ONCE:
                    while count < len(each) and masks < AT_ONCE:
                        masks += each[count].masks
                        count += 1
                some += each[:count]
                most = max(most, masks)
                if each[count:]:
                    rest.append(each[count:])
            self._compute(some, rows)
            left, seconds = rest, (time.monotonic() - began) / most
            if seconds > SLOW_SECONDS:  # of one of them: the next step shows of which
                for job in some:
                    job.sequence.entry.seconds = seconds
        return slow + [job for each in left for job in each]

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
        """One of each grammar, then those of the fastest. Whose mask is slow has failed, and so has
        who would not have them before time.monotonic() is `until`."""
        left: dict[Entry, list[Job]] = {}
        for job in jobs:
            left.setdefault(job.sequence.entry, []).append(job)
        timed: set[Entry] = set()
        failed: dict[int, str] = {}
        while left:
            entry = min(left, key=lambda each: (each in timed, each.seconds))
            timed.add(entry)
            job = left[entry].pop(0)
            if not left[entry]:
                del left[entry]
            if time.monotonic() + job.masks * entry.seconds > until:
                failed[job.sequence.id] = NO_TIME
                continue
            began = time.thread_time()
            self._compute([job], rows)
            entry.seconds = (time.thread_time() - began) / job.masks
            if entry.seconds > MASK_SECONDS:
                failed[job.sequence.id] = SLOW
        return failed

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
