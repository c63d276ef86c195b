"""How many draft tokens each decode gets: as many as pay, by what steps take and what is accepted.

A draft token is a row of a step. It pays where its chance to be accepted is larger than its price:
the seconds of a row, by the steps of before, in tokens at the rate of before. Its chance is found
without drafting, too, where a proposer compares what it predicted with what came.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items

from kvline_server.engine.ngrams import Ngrams
from kvline_server.engine.proposer import Proposer
from kvline_server.engine.request import Sequence
from kvline_server.ipc.sampling_params import SamplingParams

HORIZON_STEPS = 64  # over which costs are averages, about
# Where the rows of steps differ by less than this share of them (their standard deviation), nobody
# knows what a row costs, and a step with one draft token a sequence finds it out. That has twice
# the rows of others, so it shows while its weight is above 1/24 squared: for some 140 steps, after
# which (1 - 1/64) ** 140 / 64 is less. Where no drafts pay, one step in so many has some.
KNOWN = 1 / 24


def decode_rows(running: int, step_tokens: int, draft_tokens: int) -> int:
    """The most rows of decodes in a step: drafts take at most half of it, prompts get the rest."""
    return max(running, min(running * (1 + draft_tokens), step_tokens // 2))


class Costs:
    """Of steps of decodes alone: averages that forget."""

    def __init__(self) -> None:
        self.host = 0.0  # seconds until a step is launched
        self._weight = self._rows = self._seconds = self._tokens = 0.0
        self._rows_squared = self._rows_seconds = 0.0

    def add(self, rows: int, tokens: float, seconds: float, host: float) -> None:
        """A step of so many rows, which gave so many tokens, after `host` seconds."""
        kept = 1 - 1 / HORIZON_STEPS
        self.host += (host - self.host) / HORIZON_STEPS
        self._weight = kept * self._weight + 1
        self._rows = kept * self._rows + rows
        self._seconds = kept * self._seconds + seconds
        self._tokens = kept * self._tokens + tokens
        self._rows_squared = kept * self._rows_squared + rows * rows
        self._rows_seconds = kept * self._rows_seconds + rows * seconds

    @property
    def rate(self) -> float:
        """Tokens a second, without what the host takes; 0 before the first step."""
        return self._tokens / self._seconds if self._seconds else 0.0

    @property
    def price(self) -> float | None:
        """Tokens that a row's seconds are worth, by least squares; None: not known."""
        if not self._weight:
            return None
        rows, seconds = self._rows / self._weight, self._seconds / self._weight
        variance = self._rows_squared / self._weight - rows * rows
        if variance < (KNOWN * rows) ** 2:
            return None
        slope = (self._rows_seconds / self._weight - rows * seconds) / variance
        return max(0.0, slope) * self.rate


def by_ngrams(sequence: Sequence) -> Proposer:
    """From its own text."""
    return Ngrams(sequence.limit)


class Speculation:
    def __init__(self, most: int, propose: Callable[[Sequence], Proposer] = by_ngrams) -> None:
        """With up to `most` draft tokens a sequence and step, from its proposer."""
        self.most = most
        self._propose = propose
        self.costs = Costs()
        self.drafted = self.accepted = 0  # tokens
        self._price = 0.0
        self._now = 0  # draft tokens of a sequence, at most

    def read(self, sequence: Sequence) -> None:
        """Its new tokens."""
        if may_draft(sequence.params):
            if sequence.proposer is None:
                sequence.proposer = self._propose(sequence)
            sequence.proposer.read(sequence.tokens)

    def refresh(self) -> None:
        """Before a step is scheduled."""
        price = self.costs.price
        if price is None:  # steps must differ to show it
            self._price, self._now = 0.0, 0 if self._now else 1
        else:
            self._price, self._now = price, self.most

    def draft(self, sequence: Sequence, most: int) -> list[int]:
        """Draft tokens of a sequence whose tokens are all read."""
        count, proposer = self.wanted(sequence, most), sequence.proposer
        return proposer.draft(sequence.tokens, count) if count and proposer is not None else []

    def wanted(self, sequence: Sequence, most: int) -> int:
        """How many of them pay, `most` at most."""
        if sequence.proposer is None:
            return 0
        # The last token of all is sampled, so it is no draft.
        most = min(most, self._now, sequence.limit - len(sequence.tokens) - 1)
        return sequence.proposer.worth(self._price, most) if most > 0 else 0

    def waits(self, running: Iterable[Sequence]) -> bool:
        """Whether drafts of the running sequences save more than it costs that the host prepares a
        step only once the one before is read, as drafts begin behind the last token."""
        gain = 0.0
        for sequence in running:
            if (proposer := sequence.proposer) is not None:
                gain += proposer.gain(proposer.worth(self._price, self._now))
        return gain > self.costs.host * self.costs.rate


def accepted(drafts: Items[int], sampled: Items[int]) -> int:
    """How many draft tokens the target has sampled itself, each behind those before it."""
    pairs = zip(drafts, sampled, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), len(drafts))


def may_draft(params: SamplingParams) -> bool:
    """Whether a request's decodes have draft tokens: none whose logits are edited, as penalties are
    of the tokens so far."""
    return not (params.has_penalties or params.logit_bias)
