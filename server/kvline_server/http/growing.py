"""A text that comes in parts, as the JSON that it is sent as: each part is encoded once."""

from __future__ import annotations

import msgspec

_encode = msgspec.json.Encoder().encode


class GrowingText:
    def __init__(self) -> None:
        self._json = bytearray(b'"')

    def add(self, text: str) -> msgspec.Raw:
        """-> the part by itself"""
        part = _encode(text)
        self._json += memoryview(part)[1:-1]
        return msgspec.Raw(part)

    def whole(self) -> msgspec.Raw:
        return msgspec.Raw(bytes(self._json) + b'"')

    def __len__(self) -> int:
        """Bytes so far."""
        return len(self._json)
