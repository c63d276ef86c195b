"""What a sequence writes, from the tokens that the engine gives: text or, where a parser reads it,
events; cut at stop texts."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvline_server.formats.answer import AnswerParser, Kind
from kvline_server.formats.events import (
    CallArguments,
    CallEnd,
    CallStart,
    Event,
    Reasoning,
    Text,
    added,
)
from kvline_server.formats.lexer import NO_TOKEN
from kvline_server.http.reading import Reading
from kvline_server.http.stops import StopMatcher
from kvline_server.http.tokens import Tokens
from kvline_server.ipc.messages import Delta, PackedScores
from kvline_server.ipc.sampling_params import SamplingParams


@dataclass(slots=True)
class Piece:
    """The output of one or more engine steps, a chunk at most; the last piece has `finish`."""

    text: str = ""  # of the answer itself, without reasoning and calls
    tokens: int = 0
    scores: list[PackedScores] = field(default_factory=list)  # arrays until they are worded
    offsets: list[int] = field(default_factory=list)  # in the answer's text, of each counted token
    finish: str | None = None
    stop: str | None = None  # the stop text that ended it
    prompt_scores: list[PackedScores] = field(default_factory=list)
    cached: int = 0
    events: Sequence[Event] = ()  # in order; empty where there is text alone
    reasoning: int = 0  # of the tokens

    @property
    def goes_on(self) -> bool:
        """Whether there is nothing but text and events."""
        return self.finish is None and not self.offsets and not self.scores

    def write(self, event: Event) -> None:
        if isinstance(event, Text):
            self.text += event.text
        elif self.text and not self.events:
            self.events = [Text(self.text)]
        if self.events or not isinstance(event, Text):
            self.events = added(self.events, event)

    def written(self) -> Sequence[Event]:
        return self.events or ([Text(self.text)] if self.text else [])


@dataclass(slots=True)
class Call:
    name: str
    arguments: io.StringIO = field(default_factory=io.StringIO)


@dataclass(slots=True)
class Answer(Piece):
    """All pieces of a sequence as one, for clients that do not stream."""

    thought: io.StringIO = field(default_factory=io.StringIO)
    calls: list[Call] = field(default_factory=list)

    def count(self, piece: Piece) -> None:
        """Adds what `usage` needs; a stream keeps nothing else."""
        self.tokens += piece.tokens
        self.reasoning += piece.reasoning
        self.cached = max(self.cached, piece.cached)

    def add(self, piece: Piece) -> None:
        self.count(piece)
        self.text += piece.text
        self.prompt_scores = piece.prompt_scores or self.prompt_scores
        self.scores += piece.scores
        self.offsets += piece.offsets
        self.finish = piece.finish or self.finish
        for event in piece.events:
            if isinstance(event, Reasoning):
                self.thought.write(event.text)
            elif isinstance(event, CallStart):
                self.calls.append(Call(event.name))
            elif isinstance(event, CallArguments):
                self.calls[event.index].arguments.write(event.text)


class Writing:
    """Of one sequence, so far."""

    def __init__(
        self, tokens: Tokens | None, params: SamplingParams, stops: list[str], read: Reading | None
    ) -> None:
        self.ended = False  # by a stop text, or by the only call that is wanted
        self._params = params
        self._one_call = read is not None and read.one_call
        self._shows_reasoning = read is not None and read.shows_reasoning
        self._stream = tokens.stream() if tokens is not None else None
        self._matcher = StopMatcher(stops)
        self._parser = read.parser() if read is not None else None
        self._called = False  # a whole call has come

    def add(self, piece: Piece, delta: Delta) -> None:
        """Adds a delta of one token to a piece."""
        counted = self._params.max_tokens > 0
        shown = counted and delta.finish != "stop"  # not an end-of-sequence token
        offset = self._stream.sent if self._stream else 0
        text = self._stream.push(delta.tokens[0]) if self._stream and shown else ""
        if counted:  # each counted token has its entry: evaluation harnesses count them
            piece.tokens += 1
            piece.scores += [delta.scores] if delta.scores else []
            if self._params.logprobs is not None:
                piece.offsets.append(offset)
        piece.prompt_scores = delta.prompt_scores or piece.prompt_scores
        piece.finish, piece.cached = delta.finish, delta.cached
        if self._parser is None:
            piece.text += self._matcher.push(text)
        elif shown:
            kind = self._parser.plain(delta.tokens[0], text)
            if kind is Text and not piece.events:  # as most tokens are
                piece.text += self._matcher.push(text)
            else:
                self._parse(piece, self._parser, delta.tokens[0], text, kind)
        if delta.finish is not None:
            self._finish(piece, delta.finish)
        if self._matcher.found:
            self.ended = True
            piece.finish, piece.stop = "stop", self._matcher.text
        elif self.ended and (self._called or piece.finish != "length"):  # no cut call
            piece.finish = "stop"
        if self._called and piece.finish == "stop":
            piece.finish = "tool_calls"

    def _parse(
        self, piece: Piece, parser: AnswerParser, token: int, text: str, kind: Kind | None
    ) -> None:
        piece.reasoning += parser.in_reasoning
        if kind is None:
            self._read(piece, parser.feed([(token, text)]))
        elif kind is Text:
            self._read(piece, [Text(text)])
        elif kind is CallArguments:
            if text:
                piece.write(CallArguments(parser.calls - 1, text))
        elif text and self._shows_reasoning:
            piece.write(Reasoning(text))

    def _finish(self, piece: Piece, finish: str) -> None:
        rest = self._stream.flush() if self._stream is not None else ""
        if self._parser is None:
            piece.text += self._matcher.push(rest) + self._matcher.flush()
            return
        self._read(piece, self._parser.feed([(NO_TOKEN, rest)]))
        self._read(piece, self._parser.end(finish))
        self._release(piece)

    def _read(self, piece: Piece, events: Iterable[Event]) -> None:
        """Stop texts are those of content: what was held back as the beginning of one is none where
        something else follows."""
        for event in events:
            if self.ended:
                return
            if isinstance(event, Text):
                if text := self._matcher.push(event.text):
                    piece.write(Text(text))
                self.ended = self._matcher.found
                continue
            self._release(piece)
            if isinstance(event, CallEnd):
                self._called |= event.complete
                self.ended = self._one_call
            if not isinstance(event, Reasoning) or self._shows_reasoning:
                piece.write(event)

    def _release(self, piece: Piece) -> None:
        if held := self._matcher.flush():
            piece.write(Text(held))
