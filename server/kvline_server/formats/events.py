"""What an answer consists of, in the order in which the model wrote it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    index: int  # of the calls of this answer, from 0
    name: str  # not always one of the tools'


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A part of a call's arguments, which are JSON text; never the half of an escape."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    index: int
    complete: bool  # whether the arguments are a whole JSON object


Event = Text | Reasoning | CallStart | CallArguments | CallEnd
