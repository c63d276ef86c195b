"""Calls written as Python: `[f(a=1, b='x'), g()]`, or one after the other."""

from __future__ import annotations

import re
from collections.abc import Collection

from kvline_server.formats.json_text import BLANKS, quoted
from kvline_server.formats.output import Output
from kvline_server.formats.python_text import PythonValue
from kvline_server.formats.reader import MAX_NAME, ListReader

_LABEL = re.compile(r"[\w.-]+")


class PythonCalls(ListReader):
    closing = ")"

    def __init__(self, out: Output, known: Collection[str] | None) -> None:
        """`known`: the names that make a call where no list is around it; None: any name does."""
        super().__init__(out)
        self._known = known
        self._name = ""
        self._key = ""
        self._value: PythonValue | None = None
        self._keys = 0  # of this call that have come

    @property
    def in_value(self) -> bool:
        return self._value is not None and self._value.in_string

    def finish(self, stopped: bool) -> bool:
        value, came = self._value, ""
        if value is not None and stopped:
            value.end()
            if came := value.take():
                self._open_value(came)
        if self.calling:
            between = self._state in (self._behind_value, self._next)
            whole = stopped and (value.done if value is not None else between)
            if whole:
                self.out.arguments("}")
            self._end_call(whole)
        return bool(came)

    def _opens(self, text: str, at: int) -> bool:
        if not _LABEL.match(text, at):
            return False
        self._name = ""
        self._state = self._label
        return True

    def _label(self, text: str, at: int) -> int:
        if found := _LABEL.match(text, at):
            self._name += found[0]
            return found.end() if len(self._name) <= MAX_NAME else self._fail(found.end())
        fits = self._listed or self._known is None or self._name in self._known
        if text[at] != "(" or not fits:
            return self._fail(at)
        self._keys = 0
        self._state = self._next
        return at + 1

    def _next(self, text: str, at: int) -> int:
        """Also behind the bracket: a comma may stand before the end, too."""
        if text[at] == ")":
            return self._close(at)
        if text[at] in BLANKS:
            return at + 1
        self._key = ""
        self._state = self._rest_of_key
        return at if _LABEL.match(text, at) else self._fail(at)

    def _rest_of_key(self, text: str, at: int) -> int:
        if found := _LABEL.match(text, at):
            self._key += found[0]
            return found.end() if len(self._key) <= MAX_NAME else self._fail(found.end())
        self._state = self._equals
        return at

    def _equals(self, text: str, at: int) -> int:
        if text[at] in BLANKS:
            return at + 1
        self._value = PythonValue()
        self._state = self._through
        return at + 1 if text[at] == "=" else self._fail(at)

    def _through(self, text: str, at: int) -> int:
        value = self._value
        assert value is not None
        begun = bool(self.calling and self._keys)
        end = value.feed(text, at)
        came = value.take()
        if came:
            self._open_value(came)
        if came or begun:
            self.settled = end
        if value.broken:
            return self._fail(end)
        if value.done:
            self._value = None
            self._state = self._behind_value
        return end

    def _open_value(self, came: str) -> None:
        """Shows what came of a value, with its key and the call before it."""
        if not self.calling:
            self._begin_call(self._name)
        if self._key:
            before = ", " if self._keys else "{"
            came = f'{before}"{quoted(self._key)}": {came}'
            self._keys += 1
            self._key = ""
        self.out.arguments(came)

    def _close(self, at: int) -> int:
        if not self.calling:
            self._begin_call(self._name)
        self.out.arguments("}" if self._keys else "{}")
        self._end_call(True)
        return self._closed(at)
