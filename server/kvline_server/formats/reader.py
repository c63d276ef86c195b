"""What reads the body of calls: text goes in as it comes, events come out.

A call is decided once its name is known and a value of its arguments has begun. What was read
since the last thing that was certain (`settled`) becomes text again where the rest does not fit.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable

from kvline_server.formats.json_text import BLANKS, SPECIAL, Json, unquoted
from kvline_server.formats.output import Output

MAX_NAME = 256  # characters, of a tool, a parameter, a key


class Reader(ABC):
    """One body; each kind has its own."""

    def __init__(self, out: Output) -> None:
        self.out = out
        self.over = False  # what follows is none of it
        self.unread = 0  # nor are so many characters before that, which might have been
        self.settled: int | None = None  # in the text of the last `feed`: up to there it is certain
        self.calling = False  # a call is decided and has not ended
        self.spills = False  # its arguments broke; what follows up to a mark belongs to them
        self._state: Callable[[str, int], int] = self._start

    def feed(self, text: str, at: int) -> int:
        """-> the first position that is not taken"""
        self.settled = None
        while at < len(text) and not self.over:
            at = self._state(text, at)
        return at

    def take(self, mark: str) -> bool:
        """Whether a mark is a part of the body."""
        return False

    @property
    def in_value(self) -> bool:
        """Whether a mark that stands in the text is text here, too."""
        return False

    @property
    def special(self) -> re.Pattern[str] | None:
        """Text without this pattern goes out as arguments, and changes nothing; None where other
        text comes."""
        return None

    def finish(self, stopped: bool) -> bool:
        """Nothing follows; `stopped`: by the model's choice. -> whether all that was read is
        certain now"""
        if self.calling:
            self._end_call(False)
        return False

    @abstractmethod
    def _start(self, text: str, at: int) -> int:
        """Reads on at the start of the body. -> the next position"""

    def _begin_call(self, name: str) -> None:
        self.out.start(name)
        self.calling = True

    def _end_call(self, complete: bool) -> None:
        self.out.end_call(complete)
        self.calling = False

    def _fail(self, at: int, unread: int = 0) -> int:
        """What follows does not fit."""
        self.over, self.unread = True, unread
        if self.calling and not self.spills:
            self._end_call(False)
        return at


class ListReader(Reader):
    """Calls one after the other, or in a list."""

    closing: str  # ends a call

    def __init__(self, out: Output) -> None:
        super().__init__(out)
        self._listed = False
        self._any = False  # a call has come

    def _start(self, text: str, at: int) -> int:
        """Before a call, and behind one."""
        character = text[at]
        if self._opens(text, at):
            return at
        if character == "[" and not self._listed and not self._any:
            self._listed = True
        elif character == "]" and self._listed:
            self.settled, self.over = at + 1, True
        elif character not in BLANKS and not (self._any and character in ",;"):
            return self._fail(at)
        return at + 1

    @abstractmethod
    def _opens(self, text: str, at: int) -> bool:
        """Whether a call begins here; then it is read next."""

    @abstractmethod
    def _next(self, text: str, at: int) -> int:
        """Behind the comma after one of a call's values."""

    @abstractmethod
    def _close(self, at: int) -> int:
        """At the end of a call."""

    def _behind_value(self, text: str, at: int) -> int:
        character = text[at]
        if character == self.closing:
            return self._close(at)
        if character == ",":
            self._state = self._next
        elif character not in BLANKS:
            return self._fail(at)
        return at + 1

    def _begin_call(self, name: str) -> None:
        super()._begin_call(name)
        self._any = True

    def _closed(self, at: int) -> int:
        self.settled = at + 1
        self._state = self._start
        return at + 1


class Arguments:
    """A call's arguments as JSON, which go out as the model wrote them."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self._json = Json()
        self._held: list[str] = []
        self.shown = False

    @property
    def done(self) -> bool:
        return self._json.done

    @property
    def broken(self) -> bool:
        return self._json.broken

    @property
    def begun(self) -> bool:
        return self._json.begun

    @property
    def in_string(self) -> bool:
        return self._json.in_string

    @property
    def special(self) -> re.Pattern[str] | None:
        """As a reader's."""
        return SPECIAL if self.shown and self._json.passes else None

    def feed(self, text: str, at: int) -> int:
        end = self._json.feed(text, at)
        self._held.append(text[at:end])
        if self.shown:
            self._release()
        return end

    def show(self) -> None:
        self.shown = True
        self._release()

    def _release(self) -> None:
        text = "".join(self._held)
        safe = len(text) - (0 if self._json.broken else self._json.partial)
        self._out.arguments(text[:safe])
        self._held = [text[safe:]]


class QuotedArguments(Arguments):
    """Arguments that are a JSON string of JSON, as some models write them."""

    def __init__(self, out: Output) -> None:
        super().__init__(out)
        self._outer = Json()
        self._waits = ""  # of the string, which may be the half of an escape
        self._opened = False
        self._object = False  # its first character has come
        self.misfit = False  # that is no brace, or something follows the object

    @property
    def done(self) -> bool:
        return self._outer.done and self._json.done and not self.misfit

    @property
    def broken(self) -> bool:
        """Not before the string ends: up to there it is decoded, whatever it holds."""
        return self._outer.broken or (self._outer.done and not self.done)

    @property
    def in_string(self) -> bool:
        return self._outer.in_string

    @property
    def special(self) -> re.Pattern[str] | None:
        """All of it is decoded."""
        return None

    def feed(self, text: str, at: int) -> int:
        end = self._outer.feed(text, at)
        came = self._waits + text[at:end]
        safe = len(came) - self._outer.partial
        self._waits = came[safe:]
        inner = came[0 if self._opened else 1 : safe - 1 if self._outer.done else safe]
        self._opened = True
        beyond = self._decoded(unquoted(inner))
        if self._outer.broken:
            beyond += self._waits
        self._held.append(beyond)
        if self.shown:
            self._release()
        return end

    def _decoded(self, text: str) -> str:
        """-> what follows the value, or cannot be a part of it"""
        if not self._object and (first := text.lstrip(BLANKS)[:1]):
            self._object, self.misfit = True, first != "{"
        taken = super().feed(text, 0)
        self.misfit = self.misfit or bool(text[taken:].strip(BLANKS))
        return text[taken:]
