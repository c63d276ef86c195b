"""What an answer consists of, in the order in which the model wrote it."""

from __future__ import annotations

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
