"""What reads a model's answer as it comes: tokens go in, events come out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from kvline_server.formats.events import Event
from kvline_server.formats.lexer import Lexer, Piece
from kvline_server.formats.output import Output


class AnswerParser(ABC):
    def __init__(self, by_id: dict[int, str]) -> None:
        """`by_id`: the marks that are tokens."""
        self._lexer, self._out = Lexer(by_id), Output()
        self._reasons = False  # what comes is reasoning

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
        return self._out.take()

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
    def _end(self, stopped: bool) -> None:
        """Nothing follows; `stopped`: by the model's choice."""
