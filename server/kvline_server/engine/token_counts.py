"""The distinct tokens of a sequence and how often each was generated, as penalties need them.

Kept as arrays that grow with the output, ready for one copy to the device.
"""

from __future__ import annotations

import numpy as np


class TokenCounts:
    def __init__(self, prompt: list[int], skip: int) -> None:
        """`prompt` are tokens that count as present, but not as output; the first `skip` tokens of
        the sequence are no output."""
        self._ids = _distinct(np.fromiter(prompt, np.int64, count=len(prompt)))
        self._output = np.zeros(len(self._ids), dtype=np.float32)
        self._prompt = self._size = len(self._ids)
        self._index: dict[int, int] = {}  # of output tokens
        self._counted = skip

    @property
    def ids(self) -> np.ndarray:
        """int64 [n], distinct token ids"""
        return self._ids[: self._size]

    @property
    def output(self) -> np.ndarray:
        """float32 [n], how often each was generated"""
        return self._output[: self._size]

    def update(self, tokens: list[int]) -> None:
        """Counts the tokens that the sequence gained since the last call."""
        for token in tokens[self._counted :]:
            at = self._index.get(token)
            if at is None:
                at = self._index[token] = self._find(token)
            self._output[at] += 1
        self._counted = len(tokens)

    def _find(self, token: int) -> int:
        at = int(np.searchsorted(self._ids[: self._prompt], token))
        if at < self._prompt and self._ids[at] == token:
            return at
        if self._size == len(self._ids):
            room = max(64, self._size)
            self._ids = np.concatenate((self._ids, np.zeros(room, self._ids.dtype)))
            self._output = np.concatenate((self._output, np.zeros(room, self._output.dtype)))
        self._ids[self._size] = token
        self._size += 1
        return self._size - 1


def _distinct(ids: np.ndarray) -> np.ndarray:
    """In order. np.unique makes a hash table, which takes longer for a long prompt."""
    ids.sort()
    first = np.ones(len(ids), dtype=np.bool_)
    first[1:] = ids[1:] != ids[:-1]
    distinct: np.ndarray = ids[first]
    return distinct
