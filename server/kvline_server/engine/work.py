"""What a step computes of a sequence, as the scheduler hands it on."""

from __future__ import annotations

from collections.abc import Sequence as Items
from enum import Enum
from typing import NamedTuple, Protocol

from kvline_server.engine.pictures import Image
from kvline_server.engine.request import Sequence


class Kind(Enum):
    PROMPT = "prompt"  # tokens whose keys are missing; samples where the last of them is among them
    DECODE = "decode"  # a sequence's last token, and what may follow it: each row is sampled


NO_DRAFTS: Items[int] = ()


class Images(Protocol):
    """encoding.Encoding, of images in prompts."""

    def claims(self, sequence: Sequence) -> bool: ...

    def limit(self, sequence: Sequence, start: int, rows: int, room: int) -> int: ...

    def cuts(self, sequence: Sequence, end: int) -> Image | None: ...


class Work(NamedTuple):
    """`rows` tokens of a sequence from position `start`."""

    sequence: Sequence
    start: int
    rows: int
    kind: Kind
    drafts: Items[int] = NO_DRAFTS  # a decode's tokens behind the last one
