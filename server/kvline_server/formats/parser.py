"""Reads a model's answer as it comes: content, reasoning and calls, by the description of its
family (format.py). harmony.py has the one family whose messages have channels.

It never raises and writes nothing that the model did not. What it holds back is the beginning of
a mark, or of a call that is not decided; at the end that is text again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvline_server.formats.answer import AnswerParser, GoingOn
from kvline_server.formats.events import CallArguments, Reasoning, Text
from kvline_server.formats.format import HARMONY, Body, Format, Opening, Thinking
from kvline_server.formats.harmony import HarmonyParser
from kvline_server.formats.json_calls import JsonCalls, NamedCall
from kvline_server.formats.lexer import Mark, Searched, searched
from kvline_server.formats.output import BLANKS
from kvline_server.formats.python_calls import PythonCalls
from kvline_server.formats.reader import Reader
from kvline_server.formats.tools import Tool
from kvline_server.formats.xml_calls import FUNCTION, XmlCalls


@dataclass(frozen=True, slots=True)
class Reads:
    """What is read, and from where."""

    format: Format | None  # None: no calls
    tools: Sequence[Tool] = ()  # none: no calls
    thinking: Thinking | None = None
    in_reasoning: bool = False  # the prompt ends within it
    constrained: bool = False  # by a grammar of ours: only what that writes is a call
    only_calls: bool = False  # that grammar allows no text


def parser(reads: Reads, ids: Mapping[str, int]) -> AnswerParser:
    """`ids`: the tokenizer's added tokens by their text."""
    harmony = reads.format is HARMONY
    made = HarmonyParser(reads.tools, ids) if harmony else Parser(reads, ids)
    if reads.only_calls:
        made.omit_content()
    return made


class Parser(AnswerParser):
    def __init__(self, reads: Reads, ids: Mapping[str, int]) -> None:
        format, thinking = reads.format, reads.thinking
        openings: tuple[Opening, ...] = ()
        if format is not None and reads.tools:
            openings = format.written() if reads.constrained else format.openings
        self._openings = {each.mark: each for each in openings if each.mark}
        self._bare = {each.first: each for each in openings if not each.mark}
        self._thinking = thinking
        self._tools = {tool.name: tool for tool in reads.tools}
        marks = {thinking.open, thinking.close} if thinking is not None else set()
        marks |= format.marks() if format is not None and openings else set()
        by_id = {ids[mark]: mark for mark in marks if mark in ids}
        super().__init__(by_id)
        as_text = frozenset(marks - ids.keys())
        starts = as_text.intersection(self._openings)
        self._in_content = searched(starts)
        self._in_reasoning = searched(starts | (as_text & {thinking.close} if thinking else set()))
        self._at_start = searched(starts | (as_text & {thinking.open} if thinking else set()))
        self._closes = {
            each.close: searched(starts | (as_text & {each.close})) for each in openings
        }
        self._reasons = reads.in_reasoning and thinking is not None
        if self._reasons:
            self._out.begin_reasoning()
        self._fresh = True  # only blanks so far: a call without a mark may begin
        self._reader: Reader | None = None
        self._opening: Opening | None = None  # whose closing mark may still come
        self._before = 0  # calls when it came
        self._raw: list[str] = []  # read since the last thing that was certain

    def _run(self) -> None:
        while self._step():
            pass

    def _going_on(self) -> GoingOn | None:
        if not self._lexer.empty:
            return None
        if self._reader is not None:
            special = self._reader.special
            return None if special is None else (CallArguments, special)
        undecided = self._fresh and not self._reasons
        if undecided or not self._out.goes_on(self._reasons):
            return None
        return (Reasoning if self._reasons else Text), self._searched().first

    def _end(self, stopped: bool) -> None:
        if self._reader is not None:
            self._interrupt(self._reader, stopped)

    def _step(self) -> bool:
        """Reads one thing. -> whether there may be more"""
        if self._reader is not None:
            return self._spill() if self._reader.spills else self._read(self._reader)
        item = self._lexer.next(self._searched())
        if isinstance(item, Mark):
            self._mark(item)
        elif item is not None:
            self._write(item)
        return item is not None

    def _searched(self) -> Searched:
        if self._reasons:
            return self._in_reasoning
        if self._opening is not None:
            return self._closes[self._opening.close]
        return self._at_start if self._fresh else self._in_content

    def _mark(self, mark: Mark) -> None:
        thinking, opening = self._thinking, self._opening
        if opening is not None and mark.name == opening.close:
            self._opening = None
            self._out.drop_blanks()
        elif mark.name in self._openings:
            self._enter(self._openings[mark.name], mark)
        elif thinking is not None and mark.name == thinking.open:
            if not self._reasons:
                self._reasons = True
                self._out.begin_reasoning()
        elif thinking is not None and mark.name == thinking.close and self._reasons:
            self._reasons, self._fresh = False, True
            self._out.end_reasoning()
        else:
            self._write(mark.shown)

    def _write(self, text: str) -> None:
        if self._reasons:
            self._out.reasoning(text)
            return
        rest = text.lstrip(BLANKS)
        bare = self._bare.get(rest[:1]) if self._fresh else None
        if bare is not None:
            self._out.content(text[: len(text) - len(rest)])
            self._lexer.back(rest)
            self._enter(bare, Mark("", ""))
            return
        self._fresh = self._fresh and not rest
        self._out.content(text)

    def _enter(self, opening: Opening, mark: Mark) -> None:
        self._opening, self._raw, self._before = opening, [mark.shown], self._out.calls
        self._fresh = False
        if opening.body is Body.JSON:
            self._reader = JsonCalls(self._out, opening.trained)
        elif opening.body is Body.NAMED:
            self._reader = NamedCall(self._out)
        elif opening.body is Body.PYTHON:
            known = None if opening.trained else self._tools
            self._reader = PythonCalls(self._out, known)
        else:
            self._reader = XmlCalls(self._out, self._tools, mark.name == FUNCTION)

    def _read(self, reader: Reader) -> bool:
        item = self._lexer.peek()
        if item is None:
            return False
        if isinstance(item, Mark):
            if item.shown and reader.in_value:
                self._feed(reader, item.shown, 0)
            elif reader.take(item.name):
                self._raw.append(item.shown)
            else:
                self._interrupt(reader, True)
                return True
            self._lexer.skip()
        else:
            text, at = item
            self._lexer.advance(self._feed(reader, text, at))
        if reader.over and not reader.spills:
            self._leave()
        return True

    def _feed(self, reader: Reader, text: str, at: int) -> int:
        end = reader.feed(text, at)
        if reader.settled is None:
            self._raw.append(text[at:end])
        else:
            self._raw = [text[reader.settled : end]]
        if self._out.calls > self._before:
            self._reasons = False  # a call within it ends it
        return end

    def _spill(self) -> bool:
        """The rest of arguments that are no JSON, up to a mark."""
        assert self._reader is not None and self._opening is not None
        item = self._lexer.next(self._closes[self._opening.close])
        if isinstance(item, str):
            self._out.arguments(item)
        elif item is not None:
            self._interrupt(self._reader, True)
            self._mark(item)
        return item is not None

    def _interrupt(self, reader: Reader, stopped: bool) -> None:
        """A mark comes that is no part of the body, or the end."""
        if reader.finish(stopped):
            self._raw = []
        self._leave()

    def _leave(self) -> None:
        """The body is over; what of it was not certain is text."""
        rest, unread = "".join(self._raw), self._reader.unread if self._reader else 0
        self._reader, self._raw = None, []
        if unread:
            self._lexer.back(rest[-unread:])
            rest = rest[:-unread]
        if self._out.calls == self._before:
            self._opening = None
        if self._reasons:
            self._out.reasoning(rest)
        else:
            self._out.content(rest)
