"""What reads a model's answer as it comes: tokens go in, events come out."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable

from kvline_server.formats.events import CallArguments, Event, Reasoning, Text
from kvline_server.formats.lexer import Lexer, Piece
from kvline_server.formats.output import BLANKS, Output

Kind = type[Text] | type[Reasoning] | type[CallArguments]
GoingOn = tuple[Kind, re.Pattern[str] | None]  # what text is, up to what the pattern finds


class AnswerParser(ABC):
    def __init__(self, by_id: dict[int, str]) -> None:
        """`by_id`: the marks that are tokens."""
        self._by_id = by_id
        self._lexer, self._out = Lexer(by_id), Output()
        self._kind: Kind | None = None  # of text from here on, where that is certain
        self._first: re.Pattern[str] | None = None  # of what may end it
        self._reasons = False  # what comes is reasoning

    def omit_content(self) -> None:
        """Calls are required, and a grammar sees to that: what is no call is the beginning of one
        that was cut, or blanks."""
        self._out.omits_content = True

    @property
    def calls(self) -> int:
        """How many have begun."""
        return self._out.calls

    @property
    def in_reasoning(self) -> bool:
        """Whether the next text is reasoning: so are the tokens that bring it."""
        return self._reasons

    def feed(self, pieces: Iterable[Piece]) -> list[Event]:
        for piece in pieces:
            self._lexer.push(piece)
            self._run()
        going_on = self._going_on()
        self._kind, self._first = (None, None) if going_on is None else going_on
        return self._out.take()

    def plain(self, token: int, text: str) -> Kind | None:
        """What all of a token's text is, where that is certain: then it need not be fed. Most
        tokens are such, and this takes a fraction of the time."""
        first = self._first
        if token in self._by_id or (text and text[-1] in BLANKS):
            return None
        return self._kind if first is None or first.search(text) is None else None

    def end(self, finish: str) -> list[Event]:
        """What was held back; `finish` is `length` where the answer was cut."""
        self._lexer.end()
        self._run()
        self._end(finish != "length")
        self._out.flush()
        return self._out.take()

    @abstractmethod
    def _run(self) -> None:
        """Reads what has come."""

    @abstractmethod
    def _going_on(self) -> GoingOn | None:
        """None where something is held back, or what comes must be read."""

    @abstractmethod
    def _end(self, stopped: bool) -> None:
        """Nothing follows; `stopped`: by the model's choice."""
