"""The scheduler over a hybrid's caches, pages and slots of states, and a device whose slots hold
the tokens that a state stands for."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence as Items
from itertools import accumulate
from typing import NamedTuple

from kvline_server.engine.request import Sequence
from kvline_server.engine.scheduler import Scheduler
from kvline_server.engine.speculation import Speculation
from kvline_server.engine.work import Work
from kvline_server.memory.caches import Caches
from kvline_server.memory.states import BOUNDARY, DUMMY_SLOT, StatePool, StateStep
from kvline_server.sizing.settings import least_rows

State = tuple[int, int]  # tokens, and a hash of them
NAN: State = (-1, -1)
LOST: State = (-2, -2)  # of a slot that is free
ZERO: State = (0, 0)


def states_of(tokens: list[int]) -> list[State]:
    """Behind each number of tokens, from 0 on."""
    hashes = accumulate(tokens, lambda before, token: hash((before, token)), initial=0)
    return list(enumerate(hashes))


class Part(NamedTuple):
    """A sequence's part of a step: so many rows of its tokens."""

    tokens: list[int]
    start: int
    rows: int
    broken: bool  # its results are not finite


class Device:
    def __init__(self, slots: int) -> None:
        self.slots = [LOST] * (1 + slots)
        self.slots[DUMMY_SLOT] = ZERO

    def run(self, parts: list[Part], steps: list[StateStep]) -> list[bool]:
        """Reads and writes what the step says, and nothing else. -> of which results are finite"""
        sources = [step.source for step in steps if step.source != DUMMY_SLOT]
        writers = [slot for step in steps for slot in step.each or (step.slot,)]
        copies = [slot for step in steps for _, slot in step.snapshots]
        assert len({*writers, *copies}) == len(writers) + len(copies), "a slot is written twice"
        assert not {*sources} & {*copies} and DUMMY_SLOT not in (*writers, *copies)
        for step in steps:
            others = [each.source for each in steps if each is not step]
            written = {*step.each, step.slot}
            assert not written & {*others}, "a slot is written that another reads"
        begun = [self.slots[step.source] for step in steps]
        finite = []
        for (tokens, start, rows, broken), step, state in zip(parts, steps, begun, strict=True):
            right = states_of(tokens)
            assert state in (right[start], NAN), "another's state"
            for behind, slot in step.snapshots:
                assert behind % BOUNDARY == 0 and 0 < behind <= rows
                self.slots[slot] = NAN if broken or state == NAN else right[start + behind]
            ends = step.each or (step.slot,)
            for row, slot in enumerate(ends, rows - len(ends)):
                self.slots[slot] = NAN if broken or state == NAN else right[start + row + 1]
            finite.append(not broken and state != NAN)
        return finite

    def check(self, pool: StatePool) -> list[State]:
        """Slots that were given up lose what was in them. -> what can be found, none of it lost"""
        for slot in pool._free:
            self.slots[slot] = LOST
        snapshots = [(each, self.slots[each.slot]) for each in pool._of.values()]
        assert all(state not in (LOST, ZERO) for _, state in snapshots)
        assert not any(state == NAN for each, state in snapshots if each.confirmed)
        return [state for _, state in snapshots]


def next_token(tokens: list[int]) -> int:
    return len(tokens) % 5


class Ahead(Speculation):
    """Draft tokens, of which most are right."""

    def __init__(self) -> None:
        super().__init__(7)
        self.rng = random.Random(0)

    def draft(self, sequence: Sequence, most: int) -> list[int]:
        room = sequence.limit - len(sequence.tokens) - 1
        count = min(most, self.rng.randrange(8), room)
        right = [(len(sequence.tokens) + at) % 5 for at in range(max(0, count))]
        return [token if self.rng.random() < 0.8 else 7 for token in right]


class Played:
    """An engine whose model's next token follows from how many there are."""

    def __init__(
        self,
        running: int,
        snapshots: int,
        pages: int,
        rows: int,
        depth: int = 0,
        drafts: int = 0,
    ) -> None:
        """With up to so many draft tokens in a step."""
        self.states = StatePool(running, snapshots, drafts)
        caches = Caches((0,), (pages,), rows, self.states)
        most, ahead = max(rows, least_rows(running, True)), Ahead() if drafts else None
        self.scheduler = Scheduler(caches, running, most, speculation=ahead)
        self.steps: list[StateStep] = []  # of the work that was scheduled last
        self.device = Device(self.states.total + drafts)
        self.accepted = [0, 0]  # draft tokens, and others
        self.depth = depth
        self.ended: list[Sequence] = []
        self.broken: set[Sequence] = set()  # whose next results are not finite
        self.in_flight: deque[list[tuple[Sequence, bool, Items[int]]]] = deque()

    def step(self) -> list[Work]:
        while self.in_flight and self.scheduler.speculation is not None:
            self._collect()  # drafts begin behind the last token
        work = self.scheduler.schedule()
        if work:
            # Of a token that is not read yet the device knows the value.
            known = [
                [*w.sequence.tokens, *(w.drafts or [next_token(w.sequence.tokens)])] for w in work
            ]
            parts = [
                Part(tokens, w.start, w.rows, w.sequence in self.broken)
                for tokens, w in zip(known, work, strict=True)
            ]
            steps = [each.sequence.table.step for each in work]
            self.steps = [step for step in steps if step is not None]
            finite = self.device.run(parts, self.steps)
            self.scheduler.advance(work)
            sampled = []
            for item, good in zip(work, finite, strict=True):
                sequence, drafts = item.sequence, item.drafts
                if item.start + item.rows - len(drafts) == sequence.length:
                    sequence.pending += 1 + len(drafts)
                    sampled.append((sequence, good, drafts))
            self.in_flight.append(sampled)
        while len(self.in_flight) > (self.depth if work else 0):
            self._collect()
        self.check()
        return work

    def _collect(self) -> None:
        for sequence, good, drafts in self.in_flight.popleft():
            if sequence.ended:
                continue
            if not good:
                self.scheduler.fail(sequence)
                self.leave(sequence)
                continue
            sequence.pending -= 1 + len(drafts)
            right = 0
            for draft in (*drafts, None):
                sequence.tokens.append(next_token(sequence.tokens))
                if draft != sequence.tokens[-1]:
                    break
                right += 1
            known = len(sequence.tokens) - 1
            self.scheduler.confirm(sequence, known)
            if drafts:
                self.scheduler.truncate(sequence, known)
                self.accepted[0] += right
                self.accepted[1] += len(drafts) - right
            if len(sequence.tokens) >= sequence.limit:
                self.leave(sequence)

    def leave(self, sequence: Sequence) -> None:
        """It has ended, or its client has gone."""
        sequence.ended = True
        self.scheduler.remove(sequence)
        self.broken.discard(sequence)
        self.ended.append(sequence)
        self.check()

    def preempt(self) -> None:
        """The youngest."""
        if self.scheduler.running:
            self.scheduler._preempt(next(reversed(self.scheduler.running)))
            self.check()

    def check(self) -> None:
        scheduler = self.scheduler
        assert all(each.table.states for each in scheduler.running)
        scheduler.caches.check([each.table for each in scheduler.running])
        found = self.device.check(self.states)
        if NAN in found:
            live = (*scheduler.running, *scheduler.waiting)
            assert any(self.tainted(each) for each in live), "what failed is found"

    def tainted(self, sequence: Sequence) -> bool:
        """Whether it will fail, or may have left something of it while it was preempted."""
        table = sequence.table.states
        if table is None:
            return bool(sequence.preemptions)
        held = table.source
        own = self.device.slots[table.slot if held is None else held.slot]
        return sequence in self.broken or own == NAN
