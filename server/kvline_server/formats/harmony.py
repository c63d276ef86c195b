"""Reads messages with channels: a header up to <|message|>, then a body up to the next mark.

`analysis` is reasoning, a message to a function is a call, everything else is content.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from kvline_server.formats.answer import AnswerParser, GoingOn
from kvline_server.formats.events import CallArguments, Reasoning, Text
from kvline_server.formats.format import HARMONY
from kvline_server.formats.json_text import BLANKS
from kvline_server.formats.lexer import Mark, searched
from kvline_server.formats.reader import MAX_NAME, Arguments
from kvline_server.formats.tools import Tool

CHANNEL, MESSAGE, CONSTRAIN, START = "<|channel|>", "<|message|>", "<|constrain|>", "<|start|>"
FUNCTIONS = "functions."
MAX_HEADER = 2 * MAX_NAME  # characters; a longer one is none
_RECIPIENT = re.compile(r"\bto=(\S+)")


class HarmonyParser(AnswerParser):
    def __init__(self, tools: Sequence[Tool], ids: Mapping[str, int]) -> None:
        marks = HARMONY.marks()
        super().__init__({ids[mark]: mark for mark in marks if mark in ids})
        self._searched = searched(frozenset(marks - ids.keys()))
        self._tools = bool(tools)
        # The prompt ends behind the role, so the answer begins within a header.
        self._header: list[str] | None = []
        self._shown: list[str] = []  # of the header, as it stands in the text
        self._marked = False  # a mark has come
        self._name = ""  # of the function that the body is for
        self._arguments: Arguments | None = None
        self._raw: list[str] = []  # of arguments that are no call yet

    def _run(self) -> None:
        while (item := self._lexer.next(self._searched)) is not None:
            if isinstance(item, Mark):
                self._mark(item)
            elif self._header is not None:
                self._add(item, item)
            else:
                self._body(item)

    def _going_on(self) -> GoingOn | None:
        if self._header is not None or not self._lexer.empty:
            return None
        if self._arguments is not None:
            special = self._arguments.special if self._searched.first is None else None
            return None if special is None else (CallArguments, special)
        if not self._out.goes_on(self._reasons):
            return None
        return (Reasoning if self._reasons else Text), self._searched.first

    def _end(self, stopped: bool) -> None:
        self._end_body(stopped)
        if self._header is not None and not self._marked:
            self._give_up()

    def _mark(self, mark: Mark) -> None:
        self._marked = True
        if mark.name == MESSAGE and self._header is not None:
            self._begin_body("".join(self._header))
        elif mark.name == MESSAGE:
            self._body(mark.shown)
        elif mark.name in (CHANNEL, CONSTRAIN) and self._header is not None:
            self._add(f" {mark.name} ", mark.shown)
        else:
            self._end_body(True)
            self._header, self._shown = [], []
            if mark.name == CHANNEL:
                self._add(f" {CHANNEL} ", mark.shown)

    def _add(self, text: str, shown: str) -> None:
        assert self._header is not None
        self._header.append(text)
        self._shown.append(shown)
        if sum(map(len, self._header)) > MAX_HEADER:
            self._give_up()

    def _give_up(self) -> None:
        """What came is no header."""
        self._header, self._reasons = None, False
        self._out.content("".join(self._shown))

    def _begin_body(self, header: str) -> None:
        self._header = None
        channel = header.partition(CHANNEL)[2].split()[:1]
        recipient = _RECIPIENT.search(header)
        to = recipient[1] if recipient else ""
        name = to[len(FUNCTIONS) :] if to.startswith(FUNCTIONS) else ""
        if self._tools and 0 < len(name) <= MAX_NAME:
            self._name, self._arguments, self._raw = name, Arguments(self._out), []
        self._reasons = channel == ["analysis"]
        if self._reasons:
            self._out.begin_reasoning()

    def _body(self, text: str) -> None:
        if self._arguments is not None and not self._arguments.done:
            self._call(self._arguments, text)
        elif self._reasons:
            self._out.reasoning(text)
        else:
            self._out.content(text)

    def _call(self, arguments: Arguments, text: str) -> None:
        if not any(self._raw):
            text = text.lstrip(BLANKS)
        if text and not any(self._raw) and text[0] != "{":
            self._arguments = None
            return self._body(text)
        end = arguments.feed(text, 0)
        if not arguments.shown:
            self._raw.append(text)
        if arguments.begun and not arguments.shown:
            self._out.start(self._name)
            arguments.show()
        if arguments.done:
            self._out.end_call(True)
            self._out.content(text[end:])
        elif arguments.broken and arguments.shown:
            self._out.arguments(text[end:])
        elif arguments.broken:
            self._arguments = None
            self._body("".join(self._raw))

    def _end_body(self, stopped: bool) -> None:
        arguments, self._arguments = self._arguments, None
        if arguments is not None and stopped and not any(self._raw):
            self._out.start(self._name)
            self._out.arguments("{}")
            self._out.end_call(True)
        elif arguments is not None and not arguments.shown:
            self._body("".join(self._raw))
        elif arguments is not None and not arguments.done:
            self._out.end_call(False)
        if self._reasons:
            self._out.end_reasoning()
        self._reasons = False
