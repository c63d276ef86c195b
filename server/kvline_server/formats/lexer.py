"""Cuts the output of a model into marks and the text between them.

A mark that the tokenizer has as a token is recognised by the token's id, so that text which spells
it stays text. Any other mark is text, and may come in parts: the longest end of the text that may
begin one is held back.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

# A token's id, and the text that it added to the answer: none for a special token. Text that no
# token of its own brought, such as the end of a stream, has NO_TOKEN.
Piece = tuple[int, str]
NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Mark:
    name: str
    shown: str  # as it stands in the text; empty where it is a special token


@lru_cache(64)
def searched(marks: frozenset[str]) -> Searched:
    """The same for all answers of a model: what is compiled costs more than many tokens."""
    return Searched(marks)


class Searched:
    """Marks that are searched for in text."""

    def __init__(self, marks: Iterable[str]) -> None:
        names = sorted({mark for mark in marks if mark}, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, names))) if names else None
        self._parts = {name[:size] for name in names for size in range(1, len(name))}
        self._doubtful = bool(self._parts & set(names))
        self._longest = max(map(len, self._parts), default=0)
        firsts = "".join(map(re.escape, {name[0] for name in names}))
        self.first = re.compile(f"[{firsts}]") if firsts else None  # without it no mark begins

    def begins(self, text: str, at: int) -> bool:
        """Whether the mark that stands there may become a longer one."""
        return self._doubtful and text[at:] in self._parts

    def held(self, text: str) -> int:
        """How many of the last characters may begin a mark."""
        sizes = range(min(self._longest, len(text)), 0, -1)
        return next((size for size in sizes if text[-size:] in self._parts), 0)


class Lexer:
    """Marks and text in order; who reads says which marks the text may have just then."""

    def __init__(self, by_id: Mapping[int, str]) -> None:
        """`by_id`: the marks that are tokens."""
        self._by_id = by_id
        self._items: deque[str | Mark] = deque()
        self._at = 0  # in the first item, where that is text
        self._ended = False

    def push(self, piece: Piece) -> None:
        token, text = piece
        name = self._by_id.get(token)
        if name is None:
            self._add(text)
            return
        shown = name if text.endswith(name) else ""
        # Before it may be the end of a character that was never completed.
        self._add(text[: len(text) - len(shown)])
        self._items.append(Mark(name, shown))

    @property
    def empty(self) -> bool:
        return not self._items

    def end(self) -> None:
        self._ended = True

    def _add(self, text: str) -> None:
        last = self._items[-1] if self._items else None
        if not text:
            return
        if not isinstance(last, str):
            self._items.append(text)
            return
        # Only what is held back waits here, which is shorter than a mark.
        at = self._at if len(self._items) == 1 else 0
        self._items[-1] = last[at:] + text
        self._at -= at

    def next(self, searched: Searched) -> str | Mark | None:
        """The next mark, or the text before one; None where more must come first."""
        item = self.peek()
        if item is None or isinstance(item, Mark):
            return None if item is None else self._whole(item)
        text, at = item
        closed = self._ended or len(self._items) > 1  # no mark goes across a token
        found = searched.pattern.search(text, at) if searched.pattern else None
        if found is None:
            end = len(text) - (0 if closed else min(searched.held(text), len(text) - at))
        elif not closed and searched.begins(text, found.start()):
            end = found.start()  # another mark begins with this one
        elif found.start() > at:
            end = found.start()
        else:
            self.advance(found.end())
            return Mark(found[0], found[0])
        self.advance(end)
        return text[at:end] or None

    def peek(self) -> tuple[str, int] | Mark | None:
        """The next mark that is a token, or text and where in it to go on."""
        if not self._items:
            return None
        item = self._items[0]
        return item if isinstance(item, Mark) else (item, self._at)

    def advance(self, at: int) -> None:
        """Text is read up to there."""
        assert isinstance(self._items[0], str)
        if at < len(self._items[0]):
            self._at = at
        else:
            self.skip()

    def back(self, text: str) -> None:
        """Text was not read after all."""
        rest = ""
        if self._items and isinstance(self._items[0], str):
            rest = self._items[0][self._at :]
            self.skip()
        self._items.appendleft(text + rest)

    def skip(self) -> None:
        """The next item is read."""
        self._items.popleft()
        self._at = 0

    def _whole(self, mark: Mark) -> Mark:
        self.skip()
        return mark
