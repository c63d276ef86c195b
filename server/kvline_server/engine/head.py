"""Draft tokens from a draft head (model/draft_head.py), which the worker runs before a step.

The worker keeps the hidden states of each request's last 1 + D tokens, in a place by their
position: a step, and a draft, goes on from the one of the token before, however many drafts of the
last step were accepted.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvline_server.engine import proposer
from kvline_server.engine.batch import decode_layout
from kvline_server.engine.proposer import FIRST_RATE, HORIZON_TOKENS, MOST_RATE, Proposer
from kvline_server.engine.request import Sequence
from kvline_server.engine.scheduler import Scheduler
from kvline_server.engine.speculation import Speculation
from kvline_server.engine.work import Work
from kvline_server.worker.step import Drafting, HiddenStates

ZEROS = 0  # the place of a hidden state that is not known


class FromHead:
    """A Proposer of the drafts that it is given."""

    def __init__(self) -> None:
        self.rate = FIRST_RATE  # of drafts behind accepted ones, the share that came
        self._drafts: list[int] = []  # behind all tokens that it knows
        self._known = 0

    def give(self, drafts: list[int]) -> None:
        self._drafts = drafts

    def read(self, tokens: list[int]) -> None:
        """Proposer.read."""
        for draft, token in zip(self._drafts, tokens[self._known :], strict=False):
            self.rate += ((draft == token) - self.rate) / HORIZON_TOKENS
            self.rate = min(self.rate, MOST_RATE)
            if draft != token:
                break
        self._drafts, self._known = [], len(tokens)

    def worth(self, price: float, most: int) -> int:
        """Proposer.worth."""
        return proposer.worth(self.rate, price, most)

    def gain(self, count: int) -> float:
        """Proposer.gain."""
        return proposer.gain(self.rate, count)

    def draft(self, tokens: list[int], count: int) -> list[int]:
        """Proposer.draft."""
        return self._drafts[:count]


def by_head(sequence: Sequence) -> Proposer:
    return FromHead()


class Head:
    """The head of a worker that keeps the hidden states of 1 + `most` tokens of each request."""

    def __init__(self, run: Callable[[Drafting], NDArray[np.int64]], most: int) -> None:
        """`run` is Worker.draft."""
        self._run = run
        self._places = 1 + most

    def states(self, work: list[Work]) -> HiddenStates:
        """What a step of this work, in the order of its rows, reads and keeps."""
        rows, places, at = list[int](), list[int](), 0
        for sequence, start, count, _, _ in work:
            kept = min(count, self._places)
            rows += range(at + count - kept, at + count)
            places += (self._place(sequence, start + i) for i in range(count - kept, count))
            at += count
        return HiddenStates(
            before=self._before([(w.sequence, w.start) for w in work]),
            rows=np.asarray(rows, dtype=np.int64),
            places=np.asarray(places, dtype=np.int64),
        )

    def draft(self, scheduler: Scheduler, speculation: Speculation) -> None:
        """Gives the proposers of running sequences as many drafts as pay and have pages. The next
        step writes over what the head keeps of them."""
        found: list[tuple[int, Sequence]] = []
        spare = scheduler.spare(scheduler.max_step_tokens)
        for sequence in scheduler.running:
            if spare <= 0:
                break
            if sequence.pending or sequence.uncomputed != 1:
                continue
            count = speculation.wanted(sequence, scheduler.draftable(sequence, spare))
            if count and (count := scheduler.reserve(sequence, count)):
                found.append((count, sequence))
                spare -= count
        if not found:
            return
        found.sort(key=lambda each: -each[0])
        made = self._run(self._drafting(found, scheduler)).tolist()
        for (count, sequence), drafts in zip(found, made, strict=True):
            assert isinstance(sequence.proposer, FromHead)
            sequence.proposer.give(drafts[:count])

    def _drafting(self, found: list[tuple[int, Sequence]], scheduler: Scheduler) -> Drafting:
        """Of sequences in the order of how many drafts each gets, the most first."""
        passes = [
            [(sequence, sequence.computed + at) for count, sequence in found if count > at]
            for at in range(found[0][0])
        ]
        cleared = scheduler.caches.to_clear()
        layouts = [decode_layout(each, () if at else cleared) for at, each in enumerate(passes)]
        tokens = [sequence.tokens[-1] for _, sequence in found]
        return Drafting(np.asarray(tokens, dtype=np.int64), self._before(passes[0]), tuple(layouts))

    def _before(self, firsts: list[tuple[Sequence, int]]) -> NDArray[np.int64]:
        """The places of what stands before these positions."""
        return np.asarray(
            [ZEROS if at == s.begun else self._place(s, at - 1) for s, at in firsts], dtype=np.int64
        )

    def _place(self, sequence: Sequence, position: int) -> int:
        return 1 + sequence.request_index * self._places + position % self._places


def places(requests: int, most: int) -> int:
    """That a worker needs, for so many requests with `most` drafts each."""
    return 1 + requests * (1 + most)
