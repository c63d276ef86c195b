"""Engines of whose draft tokens as many are right as a test asks for."""

from __future__ import annotations

import random
from typing import ClassVar

from kvline_server.engine.engine import Engine
from kvline_server.engine.head import FromHead, Head
from kvline_server.engine.proposer import Proposer
from kvline_server.engine.request import Sequence
from kvline_server.engine.scheduler import Scheduler
from kvline_server.engine.speculation import Speculation


class Forced(Head):
    """A head that runs whole, and whose output is noted and replaced then: by the tokens of a plain
    run, or by others with a chance."""

    right: ClassVar[float]
    known: ClassVar[dict[int, list[int]]]  # answers, by request
    rng = random.Random(0)
    offered: list[tuple[list[int], list[int]]]  # its drafts, with the tokens before them

    def draft(self, scheduler: Scheduler, speculation: Speculation) -> None:
        super().draft(scheduler, speculation)
        for sequence in scheduler.running:
            proposer = sequence.proposer
            if isinstance(proposer, FromHead) and proposer._drafts:
                self.offered.append((list(sequence.tokens), proposer._drafts))
                at = len(sequence.tokens) - sequence.prompt_length
                answer = self.known[sequence.id][at:]
                pairs = zip(proposer._drafts, answer, strict=False)
                proposer.give([self._forced(*pair) for pair in pairs])

    def _forced(self, draft: int, token: int) -> int:
        if self.rng.random() < self.right:
            return token
        return draft if draft != token else (token + 1) % 250


def forced(right: float, answers: dict[int, list[int]]) -> type[Forced]:
    """With a chance that each draft is the right one, of plain decoding's."""
    own = {"right": right, "known": answers, "rng": random.Random(1), "offered": []}
    return type("Forcing", (Forced,), own)


class Known:
    """A Proposer that knows the answer, and proposes another token with a chance."""

    def __init__(self, answer: list[int], prompt: int, right: float, rng: random.Random) -> None:
        self.answer, self.prompt, self.right, self.rng = answer, prompt, right, rng

    def read(self, tokens: list[int]) -> None:
        """It knows them."""

    def worth(self, price: float, most: int) -> int:
        return self.rng.randint(0, most)

    def gain(self, count: int) -> float:
        return count * self.right

    def draft(self, tokens: list[int], count: int) -> list[int]:
        at = len(tokens) - self.prompt
        found = self.answer[at : at + count]
        return [t if self.rng.random() < self.right else (t + 1) % 250 for t in found]


def knowing(made: Engine, right: float, answers: dict[int, list[int]]) -> Engine:
    """An engine whose draft tokens are right with a chance, wherever they come from in service."""
    rng = random.Random(2)

    def propose(sequence: Sequence) -> Proposer:
        return Known(answers[sequence.id], sequence.prompt_length, right, rng)

    assert made.speculation is not None
    made.speculation._propose = propose
    return made
