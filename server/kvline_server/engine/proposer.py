"""Where the draft tokens of one sequence come from (speculation.py says how many it gets): from its
own text (ngrams.py), or from a draft head (head.py)."""

from __future__ import annotations

import math
from typing import Protocol

# The share of predicted tokens that came is an average over about so many of the last ones.
HORIZON_TOKENS = 16
FIRST_RATE = 0.5
MOST_RATE = 0.98


class Proposer(Protocol):
    """Of one running sequence. A wrong draft costs a row of a step, and changes no token."""

    def read(self, tokens: list[int]) -> None:
        """Those that the sequence gained since the last call, of all its `tokens`."""

    def worth(self, price: float, most: int) -> int:
        """How many draft tokens have at least the chance `price` to be accepted, `most` at most."""

    def gain(self, count: int) -> float:
        """Tokens of so many draft tokens that are accepted on average."""

    def draft(self, tokens: list[int], count: int) -> list[int]:
        """Up to `count` draft tokens behind all `tokens`, which it has read. Needs `worth` above
        0."""


def worth(rate: float, price: float, most: int) -> int:
    """Where a draft token is accepted at this `rate`, if those before it are: how many of them have
    at least the chance `price`, `most` at most."""
    if rate < price:
        return 0
    return most if price <= 0 else min(most, int(math.log(price) / math.log(rate)))


def gain(rate: float, count: int) -> float:
    """Of so many draft tokens those that are accepted on average."""
    return rate * (1 - rate**count) / (1 - rate)
