"""What a model writes, as events: text, reasoning, and calls of tools with their arguments."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvline_server.http.generate import Piece


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    index: int
    text: str  # a piece of JSON


@dataclass(frozen=True, slots=True)
class CallEnd:
    index: int


Event = Text | Reasoning | CallStart | CallArguments | CallEnd


def events_of(piece: Piece) -> Iterable[Event]:
    """All that a model writes is text: nothing reads calls or reasoning from it."""
    return [Text(piece.text)] if piece.text else []
