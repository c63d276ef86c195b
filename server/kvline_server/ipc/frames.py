"""Frames, in which all of the server's processes send each other what they do: a body after its
length. One longer than any that is sent is refused by its length, before its body is waited for.

Engine, ranks, HTTP and parent read messages of them (messages.py), renderers of chat templates JSON
and text. Imports no more than they need: their memory is beside the KV cache.
"""

from __future__ import annotations

from typing import IO, TYPE_CHECKING

from kvline_server.errors import InvalidFrame

if TYPE_CHECKING:
    import asyncio

HEADER = 4  # bytes of the body's length, little-endian
# Bytes. A prompt of a million tokens takes five million, a rendering less than half of the memory
# that it may take (chat_tokens.py), which is 72 MiB at most.
MAX_BODY = 64 << 20


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(HEADER, "little") + body


def write(out: IO[bytes], body: bytes) -> None:
    out.write(framed(body))
    out.flush()


def read(source: IO[bytes]) -> bytes | None:
    """The next body; None at the end, even one in the middle of a frame. Raises InvalidFrame."""
    header = source.read(HEADER)
    if len(header) < HEADER:
        return None
    length = _length(header)
    body = source.read(length)
    return body if len(body) == length else None


async def receive(reader: asyncio.StreamReader) -> bytes:
    """The next body. Raises IncompleteReadError at the end, and InvalidFrame."""
    return await reader.readexactly(_length(await reader.readexactly(HEADER)))


class Received:
    """What has come on a socket, in pieces of any size."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, data: bytes) -> None:
        self._data += data

    def take(self) -> bytes | None:
        """The first body that has come whole. Raises InvalidFrame."""
        if len(self._data) < HEADER:
            return None
        end = HEADER + _length(self._data[:HEADER])
        if len(self._data) < end:
            return None
        body = bytes(self._data[HEADER:end])
        del self._data[:end]
        return body


def _length(header: bytes | bytearray) -> int:
    """Of the body."""
    length = int.from_bytes(header, "little")
    if length > MAX_BODY:
        raise InvalidFrame(f"a frame of {length} bytes, where one has {MAX_BODY} at most")
    return length
