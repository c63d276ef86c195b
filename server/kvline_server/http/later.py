"""JSON of large answers in chunks: long lists are encoded a few tokens at a time while sent.

Encoded at once, the top 20 logprobs of 8,192 prompt tokens take 90 MiB of Python objects.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import msgspec

ENTRIES = 32  # of a list that are Python objects at once
_PLACE = b"\0"  # stands in no JSON text


class Later:
    """A JSON list whose entries are created while it is encoded."""

    def __init__(self, entries: Callable[[], Iterable[Any]], at_once: int = ENTRIES) -> None:
        self._entries, self._at_once = entries, at_once

    def chunks(self) -> Iterator[bytes]:
        yield b"["
        first = True
        entries = iter(self._entries())
        while some := list(islice(entries, self._at_once)):
            text = msgspec.json.encode(some)[1:-1]
            yield text if first else b"," + text
            first = False
        yield b"]"


class LaterBase64:
    """A JSON string: the base64 of bytes that are created while it is encoded."""

    def __init__(self, parts: Callable[[], Iterable[bytes]]) -> None:
        self._parts = parts

    def chunks(self) -> Iterator[bytes]:
        yield b'"'
        rest = b""  # of three bytes that become one group
        for part in self._parts():
            data = rest + part if rest else part
            whole = len(data) // 3 * 3
            rest = data[whole:]
            yield base64.b64encode(data[:whole])
        yield base64.b64encode(rest) + b'"'


def encode(value: Any) -> Iterator[bytes]:
    """The JSON text of `value` in chunks; a single one without any Later in it."""
    found: list[Later | LaterBase64] = []

    def place(item: Any) -> msgspec.Raw:
        if not isinstance(item, Later | LaterBase64):
            raise TypeError(type(item).__name__)
        found.append(item)
        return msgspec.Raw(_PLACE)

    head, *rest = msgspec.json.Encoder(enc_hook=place).encode(value).split(_PLACE)
    yield head
    for item, text in zip(found, rest, strict=True):
        yield from item.chunks()
        yield text
