"""Frames between an HTTP process and those that render its chat templates: a length and a body."""

from __future__ import annotations

from typing import IO

OK, FAILED = b"=", b"!"  # begin an answer
LENGTH = 4  # bytes
MAX_FRAME = 256 << 20  # bytes: of twice the largest body; a rendering has less memory


def read(source: IO[bytes]) -> bytes | None:
    """A frame; None at the end, and where one is longer than any that is sent."""
    head = source.read(LENGTH)
    if len(head) < LENGTH:
        return None
    size = int.from_bytes(head, "big")
    if size > MAX_FRAME:
        return None
    body = source.read(size)
    return body if len(body) == size else None


def write(out: IO[bytes], body: bytes) -> None:
    out.write(len(body).to_bytes(LENGTH, "big") + body)
    out.flush()


def packed(text: str, origins: bytes) -> bytes:
    """A rendered text, and a byte for each of its characters."""
    return len(origins).to_bytes(LENGTH, "big") + origins + text.encode()


def unpacked(body: bytes) -> tuple[str, bytes]:
    end = LENGTH + int.from_bytes(body[:LENGTH], "big")
    return body[end:].decode(), body[LENGTH:end]
