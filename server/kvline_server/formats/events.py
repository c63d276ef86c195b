"""What an answer consists of, in the order in which the model wrote it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Text(msgspec.Struct, frozen=True, gc=False):
    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    text: str


class CallStart(msgspec.Struct, frozen=True, gc=False):
    index: int  # of the calls of this answer, from 0
    name: str  # not always one of the tools'


class CallArguments(msgspec.Struct, frozen=True, gc=False):
    """A part of a call's arguments, which are JSON text; never the half of an escape."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True, gc=False):
    index: int
    complete: bool  # whether the arguments are a whole JSON object


Event = Text | Reasoning | CallStart | CallArguments | CallEnd


def added(events: Sequence[Event], event: Event) -> list[Event]:
    """With one more at the end, which is one with the last where both are of one kind and call."""
    both = _joined(events[-1], event) if events else None
    return [*events, event] if both is None else [*events[:-1], both]


def _joined(one: Event, other: Event) -> Event | None:
    if isinstance(one, Text):
        return Text(one.text + other.text) if isinstance(other, Text) else None
    if isinstance(one, Reasoning):
        return Reasoning(one.text + other.text) if isinstance(other, Reasoning) else None
    if isinstance(one, CallArguments) and isinstance(other, CallArguments):
        return CallArguments(one.index, one.text + other.text) if one.index == other.index else None
    return None
