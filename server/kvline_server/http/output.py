"""What a model has written, as events: the one place where they are read from a sequence's text."""

from __future__ import annotations

from collections.abc import Iterable

from kvline_server.formats.events import Event, Text
from kvline_server.http.generate import Piece


def events_of(piece: Piece) -> Iterable[Event]:
    """All that a model writes is text: nothing reads calls or reasoning from it."""
    return [Text(piece.text)] if piece.text else []
