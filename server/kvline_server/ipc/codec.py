"""Messages to frames and back: tagged msgpack structs, of a list that both sides have."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from kvline_server.errors import InvalidFrame
from kvline_server.ipc import frames

M = TypeVar("M")


class Codec(Generic[M]):
    def __init__(self, kinds: Any) -> None:
        """Of the union that M is."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(kinds)

    def encode(self, message: M) -> bytes:
        """A frame."""
        return frames.framed(self._encoder.encode(message))

    def decode(self, body: bytes) -> M:
        """Of a frame's body. Raises InvalidFrame."""
        try:
            message: M = self._decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise InvalidFrame(f"a frame of {len(body)} bytes is no message: {error}") from None
        return message
