"""What a process that renders chat templates answers: OK with a text and who wrote each of its
characters, or FAILED with what is wrong."""

from __future__ import annotations

OK, FAILED = b"=", b"!"  # begin an answer
LENGTH = 4  # bytes of the number of origins


def packed(text: str, origins: bytes) -> bytes:
    """A rendered text, and a byte for each of its characters."""
    return len(origins).to_bytes(LENGTH, "little") + origins + text.encode()


def unpacked(body: bytes) -> tuple[str, bytes]:
    end = LENGTH + int.from_bytes(body[:LENGTH], "little")
    return body[end:].decode(), body[LENGTH:end]
