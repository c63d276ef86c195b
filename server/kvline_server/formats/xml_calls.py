"""Calls written as `<function=f><parameter=a>text</parameter></function>`: values have no types of
their own, and end at their closing mark alone."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvline_server.formats.json_text import BLANKS, SPECIAL, Json, quoted
from kvline_server.formats.lexer import Searched
from kvline_server.formats.output import Output
from kvline_server.formats.reader import MAX_NAME, Reader
from kvline_server.formats.tools import Tool
from kvline_server.formats.typed import Kind, kind, typed

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
_SPECIAL = re.compile(f"<|{SPECIAL.pattern}")  # what may begin the closing mark, too
# The newlines around a value are the format's.
_END = Searched([f"\n{END_PARAMETER}", END_PARAMETER])


class XmlCalls(Reader):
    def __init__(self, out: Output, tools: Mapping[str, Tool], named: bool) -> None:
        """`named`: the first mark was FUNCTION itself."""
        super().__init__(out)
        self._tools = tools
        self._expected: tuple[str, ...] = (FUNCTION,)
        self._seen = ""  # of an expected mark
        self._name, self._key = "", ""
        self._parameters = 0  # of this call that have come
        if named:
            self._state = self._function
        self._value = Value(out, {}, {})

    @property
    def in_value(self) -> bool:
        return self._state == self._through

    def finish(self, stopped: bool) -> bool:
        if self.calling and not stopped:
            self._end_call(False)
        elif self.calling:
            if self.in_value:
                self._value.end()
            self._close()
        return False

    def _start(self, text: str, at: int) -> int:
        """One of the expected marks, after blanks."""
        if not self._seen and text[at] in BLANKS:
            return at + 1
        seen = self._seen + text[at]
        if seen in self._expected:
            self._seen = ""
            self._marked(seen, at + 1)
        elif any(mark.startswith(seen) for mark in self._expected):
            self._seen = seen
        else:
            if self.calling:
                self._close()  # without what does not belong to it
            return self._fail(at, unread=len(self._seen))
        return at + 1

    def _marked(self, mark: str, at: int) -> None:
        if mark == FUNCTION:
            self._name, self._state = "", self._function
        elif mark == PARAMETER:
            self._key, self._state = "", self._parameter
        else:
            if not self.calling:
                self._begin()
            self._close()
            self._expected, self.settled = (FUNCTION,), at

    def _function(self, text: str, at: int) -> int:
        self._name, end, whole = _label(self._name, text, at)
        if whole:
            self._parameters = 0
            self._expected, self._state = (PARAMETER, END_FUNCTION), self._start
        return end if end > at else self._fail(at)

    def _parameter(self, text: str, at: int) -> int:
        self._key, end, whole = _label(self._key, text, at)
        if end == at:
            if self.calling:
                self._close()
            return self._fail(at)
        if whole:
            if not self.calling:
                self._begin()
            tool = self._tools.get(self._name)
            schema = tool.properties().get(self._key, {}) if tool else {}
            self._value = Value(self.out, schema, tool.parameters if tool else {})
            self._value.prefix = f'{", " if self._parameters else "{"}"{quoted(self._key)}": '
            self._parameters += 1
            self.settled, self._state = end, self._through
        return end

    def _through(self, text: str, at: int) -> int:
        end = self._value.feed(text, at)
        self.settled = end
        if self._value.done:
            self._state = self._start
        return end

    @property
    def special(self) -> re.Pattern[str] | None:
        return self._value.special if self._state == self._through else None

    def _begin(self) -> None:
        self._begin_call(self._name)

    def _close(self) -> None:
        self.out.arguments("}" if self._parameters else "{}")
        self._end_call(True)


class Value:
    """One parameter's."""

    def __init__(self, out: Output, schema: object, root: Mapping[str, object]) -> None:
        self._out, self._schema, self._root = out, schema, root
        self._kind = kind(schema, root)
        self.prefix = ""  # shown before the first of it
        self.done = False
        self._first = True  # nothing has come
        self._tail = ""  # may begin the closing mark
        self._parts: list[str] = []  # that are not shown yet
        self._json = Json() if self._kind is Kind.WHOLE else None  # a list or an object, if any

    @property
    def special(self) -> re.Pattern[str] | None:
        """As a reader's: of a string that is shown as it comes."""
        shown = self._kind is Kind.STRING and not (self.prefix or self._tail or self.done)
        return _SPECIAL if shown else None

    def feed(self, text: str, at: int) -> int:
        if self._first and text[at] == "\n":
            at += 1
        self._first = False
        came, start = (self._tail + text[at:], 0) if self._tail else (text, at)
        shift = at - (len(self._tail) if self._tail else at)
        assert _END.pattern is not None
        while (found := _END.pattern.search(came, start)) is not None:
            self._add(came[start : found.start()])
            if not self._is_quoted(found[0]):
                self.end(written=True)
                return found.end() + shift
            self._add(found[0])
            start = found.end()
        keep = min(_END.held(came), len(came) - start)
        self._add(came[start : len(came) - keep])
        self._tail = came[len(came) - keep :]
        return len(text)

    def _add(self, text: str) -> None:
        if not text:
            return
        self._parts.append(text)
        if self._json is not None:
            self._json.feed(text)
            if text.strip(BLANKS) and not self._json.is_nested:
                self._json = None
        if self._kind is Kind.STRING_OR_NULL:
            value = "".join(self._parts)
            if "null".startswith(value.strip(BLANKS)):
                return
            self._kind = Kind.STRING
        if self._kind is Kind.STRING:
            self._show(quoted("".join(self._parts)), opening='"')
            self._parts = []

    def _is_quoted(self, mark: str) -> bool:
        """Whether it is a part of a string within a list or an object, which has no newline."""
        scan = self._json
        return scan is not None and scan.in_string and not scan.broken and mark == END_PARAMETER

    def _show(self, text: str, opening: str = "") -> None:
        if self.prefix:
            text = self.prefix + opening + text
            self.prefix = ""
        self._out.arguments(text)

    def end(self, written: bool = False) -> None:
        """The value is whole; `written`: its closing mark has come, else what may have begun one
        is text."""
        if not written:
            self._add(self._tail)
        self.done = True
        if self._kind is Kind.STRING:
            self._show('"', opening='"')
        else:
            self._show(typed("".join(self._parts), self._schema, self._root))


def _label(label: str, text: str, at: int) -> tuple[str, int, bool]:
    """A name that ends with `>`. -> what of it has come; where to go on, `at` where it cannot be
    one; whether it is whole"""
    end = text.find(">", at)
    part = text[at : end if end >= 0 else len(text)]
    label += part
    wrong = "\n" in part or "<" in part or len(label) > MAX_NAME or (end >= 0 and not label)
    if wrong:
        return label, at, False
    return label, end + 1 if end >= 0 else len(text), end >= 0
