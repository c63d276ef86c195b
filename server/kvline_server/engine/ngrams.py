"""Draft tokens from a sequence's own text: what came after its last tokens where they stood before
(prompt lookup decoding).

Two tables keep where four and where two tokens were seen last, by their hash, in as many bytes
whatever the text. A token costs a few operations: while the text goes on as it did there, nothing
is looked up.
"""

from __future__ import annotations

from array import array

import numpy as np

from kvline_server.engine import proposer
from kvline_server.engine.proposer import FIRST_RATE, HORIZON_TOKENS, MOST_RATE

LONG, SHORT = 4, 2  # tokens that are looked up, the longer ones first
MOST_BITS = 15  # of a table; in a longer text what was seen early is found less often
ENTRY = 4  # bytes
AT_ONCE = 64  # tokens from which on arrays are faster
_WORD = 0xFFFFFFFF
_LAST, _BEFORE, _PAIR = 0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35


def table_bits(limit: int) -> int:
    """For a sequence of up to `limit` tokens: each of its positions has two entries, or more."""
    return min(MOST_BITS, max(6, (2 * limit - 1).bit_length()))


def table_bytes(limit: int) -> int:
    """Of both tables."""
    return 2 * ENTRY << table_bits(limit)


class Ngrams:
    """A Proposer."""

    def __init__(self, limit: int) -> None:
        """Of a sequence of up to `limit` tokens."""
        bits = table_bits(limit)
        self._shift = 32 - bits
        self._long = array("i", bytes(ENTRY << bits))  # position behind them; 0: not seen
        self._short = array("i", bytes(ENTRY << bits))
        self._read = 0  # tokens of the sequence that it knows
        self._next = 0  # of these, the one that is expected now; 0: none is
        self.rate = FIRST_RATE  # share of expected tokens that came

    def read(self, tokens: list[int]) -> None:
        """Proposer.read."""
        if len(tokens) - self._read > AT_ONCE:
            self._read_many(tokens, len(tokens) - 1)
        for at in range(self._read, len(tokens)):
            self._add(tokens, at)
        self._read = len(tokens)

    def worth(self, price: float, most: int) -> int:
        """Proposer.worth."""
        return proposer.worth(self.rate, price, most) if self._next else 0

    def gain(self, count: int) -> float:
        """Proposer.gain."""
        return proposer.gain(self.rate, count)

    def draft(self, tokens: list[int], count: int) -> list[int]:
        """The next `count` tokens of the sequence, as they came before. Needs `worth` above 0."""
        found = tokens[self._next : self._next + count]
        if len(found) < count:  # the text repeats itself from there on
            found = (found * (count // len(found) + 1))[:count]
        return found

    def _add(self, tokens: list[int], at: int) -> None:
        token, expected = tokens[at], self._next
        if expected:
            hit = tokens[expected] == token
            self.rate += (hit - self.rate) / HORIZON_TOKENS
            self.rate = min(self.rate, MOST_RATE)
            self._next = expected + 1 if hit else 0
        if at < SHORT - 1:
            return
        pair = _pair(token, tokens[at - 1])
        short, long, behind = pair >> self._shift, -1, at + 1
        if at >= LONG - 1:
            before = _pair(tokens[at - 2], tokens[at - 3])
            long = (pair + before * _PAIR & _WORD) >> self._shift
        if not self._next:
            self._next = self._find(tokens, behind, short, long)
        self._short[short] = behind
        if long >= 0:
            self._long[long] = behind

    def _find(self, tokens: list[int], end: int, short: int, long: int) -> int:
        """Where the last tokens before `end` stood last, the position behind them; 0: nowhere."""
        found = ((LONG, self._long[long] if long >= 0 else 0), (SHORT, self._short[short]))
        for count, behind in found:
            # Others may have the same hash.
            if behind and tokens[behind - count : behind] == tokens[end - count : end]:
                return behind
        return 0

    def _read_many(self, tokens: list[int], end: int) -> None:
        """As _add, up to `end`, but what was expected."""
        first = max(0, self._read - LONG + 1)
        ids = np.asarray(tokens[first:end], dtype=np.uint64)
        pair = (ids[1:] * _LAST + ids[:-1] * _BEFORE) & _WORD
        long = (pair[2:] + pair[:-2] * _PAIR) & _WORD
        # Of several positions of one hash the last one is kept.
        for table, hashed, count in ((self._short, pair, SHORT), (self._long, long, LONG)):
            behind = np.arange(first + count, end + 1, dtype=np.int32)
            np.frombuffer(table, np.int32)[hashed >> self._shift] = behind
        self._read, self._next = end, 0


def _pair(last: int, before: int) -> int:
    return last * _LAST + before * _BEFORE & _WORD
