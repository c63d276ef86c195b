"""What penalties ask of a sequence: its different tokens, and how often it said each.

Arrays that grow with what is said, ready to be sent to the device in one piece.
"""

from __future__ import annotations

import numpy as np


class Tally:
    def __init__(self, prompt: list[int], heard: int) -> None:
        """`heard` tokens are not counted as said."""
        self._ids = np.unique(np.fromiter(prompt, np.int64, count=len(prompt)))
        self._said = np.zeros(len(self._ids), dtype=np.float32)
        self._prompt = self._size = len(self._ids)
        self._place: dict[int, int] = {}  # of what was said
        self._heard = heard

    @property
    def ids(self) -> np.ndarray:
        """int64 [n], each once"""
        return self._ids[: self._size]

    @property
    def said(self) -> np.ndarray:
        """float32 [n]"""
        return self._said[: self._size]

    def hear(self, tokens: list[int]) -> None:
        """Counts what was added since the last time."""
        for token in tokens[self._heard :]:
            at = self._place.get(token)
            if at is None:
                at = self._place[token] = self._find(token)
            self._said[at] += 1
        self._heard = len(tokens)

    def _find(self, token: int) -> int:
        at = int(np.searchsorted(self._ids[: self._prompt], token))
        if at < self._prompt and self._ids[at] == token:
            return at
        if self._size == len(self._ids):
            room = max(64, self._size)
            self._ids = np.concatenate((self._ids, np.zeros(room, self._ids.dtype)))
            self._said = np.concatenate((self._said, np.zeros(room, self._said.dtype)))
        self._ids[self._size] = token
        self._size += 1
        return self._size - 1
