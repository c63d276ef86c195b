"""Cuts a stream of text at the first stop text, and holds back what may begin one.

Each stop is matched by Knuth, Morris and Pratt's method, so that a token costs as much for a text
that nearly repeats the stop as for any other: sixteen stops of 256 characters are allowed.
"""

from __future__ import annotations

import re
from array import array
from functools import lru_cache


class StopMatcher:
    """Finds the first stop text in a stream and holds back text that may begin one."""

    def __init__(self, stops: list[str]) -> None:
        self._stops = [_Stop(text) for text in stops]
        self._first = _first_characters(tuple(stops))
        self._held = ""
        self.found = False
        self.text = ""  # the stop text that was found

    def push(self, text: str) -> str:
        """The text that can be sent now; empty after `found`."""
        if self.found:
            return ""
        if not self._held and (not self._stops or self._first.search(text) is None):
            return text
        before = len(self._held)
        self._held += text
        ends = [(stop, stop.feed(text)) for stop in self._stops]
        found = [
            (before + end - len(stop.text), stop.text) for stop, end in ends if end is not None
        ]
        if found:
            start, self.text = min(found)
            self.found = True
            out, self._held = self._held[:start], ""
            return out
        cut = len(self._held) - max(stop.matched for stop in self._stops)
        out, self._held = self._held[:cut], self._held[cut:]
        return out

    def flush(self) -> str:
        """What was held back; nothing that comes later makes a stop of it."""
        for stop in self._stops:
            stop.matched = 0
        out, self._held = self._held, ""
        return "" if self.found else out


class _Stop:
    """One stop text, and how much of it the end of the stream is."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0  # characters
        self._shorter = _shorter(text)

    def feed(self, more: str) -> int | None:
        """-> where in `more` the stop is complete; None where it is not"""
        text, matched, shorter = self.text, self.matched, self._shorter
        for at, character in enumerate(more, 1):
            while matched and text[matched] != character:
                matched = shorter[matched - 1]
            if text[matched] == character:
                matched += 1
                if matched == len(text):
                    return at
        self.matched = matched
        return None


@lru_cache(256)
def _shorter(text: str) -> array[int]:
    """For each prefix of `text`: the length of the longest shorter prefix that it ends with."""
    out, matched = array("H", [0] * len(text)), 0
    for at in range(1, len(text)):
        while matched and text[matched] != text[at]:
            matched = out[matched - 1]
        matched += text[matched] == text[at]
        out[at] = matched
    return out


@lru_cache(256)
def _first_characters(stops: tuple[str, ...]) -> re.Pattern[str]:
    """Most text has none of them, and can be sent at once."""
    return re.compile("|".join(re.escape(character) for character in {stop[0] for stop in stops}))
