"""Compiled grammars by key: those in use, and as many others as there is room for."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from llguidance import LLMatcher

from kvline_server.grammars.grammar import Grammar

MAX_REFUSED = 1024  # grammars of which it is kept why they are refused
SHARED = 16  # sequences that use a lexer, before another one is made where there are more threads


@dataclass(eq=False, slots=True)
class Lexer:
    """A matcher at its beginning; its copies share its lexer, and only one at a time is filled."""

    start: LLMatcher
    sequences: int = 0  # that use it


@dataclass(eq=False, slots=True)
class Entry:
    key: bytes
    grammar: Grammar
    size: int  # bytes that it took when it was tried
    lexers: list[Lexer] = field(default_factory=list)
    pins: int = 0  # requests that it is kept for
    growing: bool = False  # another lexer is made
    seconds: float = 0.0  # that a mask of it took when last timed, or at most

    @property
    def used(self) -> bool:
        return self.pins > 0 or any(lexer.sequences for lexer in self.lexers)

    def least(self) -> Lexer:
        """The one that the fewest sequences use."""
        return min(self.lexers, key=lambda lexer: lexer.sequences)

    def is_full(self, most: int) -> bool:
        """Whether another lexer, of `most`, would let masks be filled at once."""
        return len(self.lexers) < most and not self.growing and self.least().sequences >= SHARED


class Cache:
    def __init__(self) -> None:
        self._entries: OrderedDict[bytes, Entry] = OrderedDict()  # last used last
        self._refused: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> Entry | None:
        """With a lexer: one that broke may have had no successor."""
        entry = self._entries.get(key)
        if entry is None or not entry.lexers:
            self._entries.pop(key, None)
            return None
        self._entries.move_to_end(key)
        return entry

    def add(self, entry: Entry) -> None:
        self._entries[entry.key] = entry

    def drop(self, entry: Entry) -> None:
        """Sequences that use it go on; the next request has it compiled anew."""
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]

    def unused(self) -> Entry | None:
        """Of those that may be dropped, the one that was used first."""
        return next((entry for entry in self._entries.values() if not entry.used), None)

    def why_refused(self, key: bytes) -> str | None:
        return self._refused.get(key)

    def refuse(self, key: bytes, reason: str) -> None:
        self._refused[key] = reason
        while len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)
