"""Text that knows of each of its characters who wrote it, through all that a chat template does to
it. So a template gets texts as they are, and what it makes of them is still known to be a client's.

An operation that is not followed gives text of unknown origin: never the template's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, SupportsIndex

OWN = 0  # the template's, or the model's files'
HISTORY = 1  # an assistant's message: tokens that were generated, and shown as text
CLIENT = 2
UNKNOWN = 3


class Traced(str):
    __slots__ = ("_origins",)  # a byte for each character; the underscore hides it from templates

    _origins: bytes

    def __new__(cls, text: str = "", origins: bytes | None = None) -> Traced:
        made = super().__new__(cls, text)
        made._origins = bytes([UNKNOWN]) * len(text) if origins is None else origins
        return made

    def __str__(self) -> Traced:
        return self

    def __iter__(self) -> Iterator[str]:
        return (self[at] for at in range(len(self)))

    def __getitem__(self, at: SupportsIndex | slice, /) -> Traced:
        text = super().__getitem__(at)
        if not isinstance(at, slice):
            at = slice(int(at), int(at) + 1 or None)
        return Traced(text, self._origins[at])

    def __add__(self, other: str, /) -> Traced:
        if hasattr(other, "__html__"):
            return NotImplemented  # of markupsafe, which then escapes this one
        return Traced(super().__add__(other), self._origins + origins(other))

    def __radd__(self, other: str, /) -> Traced:
        return Traced(str.__add__(other, self), origins(other) + self._origins)

    def __mul__(self, times: SupportsIndex, /) -> Traced:
        return Traced(super().__mul__(times), self._origins * int(times))

    __rmul__ = __mul__

    def __mod__(self, given: Any, /) -> Traced:
        values = given if isinstance(given, tuple) else (given,)
        return filled(self, "%s", values, super().__mod__(given))

    def join(self, parts: Iterable[str], /) -> Traced:
        parts = list(parts)
        return Traced(super().join(parts), self._origins.join(map(origins, parts)))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> Traced:
        text, left = super().replace(old, new, count), int(count)
        if not old:
            return Traced(text)
        out, put, at = bytearray(), origins(new), 0
        while left and (found := self.find(old, at)) >= 0:
            out += self._origins[at:found]
            out += put
            at, left = found + len(old), left - 1
        return Traced(text, bytes(out + self._origins[at:]))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Traced]:  # type: ignore[override]
        return self._located(super().split(sep, maxsplit), len(sep or ""))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Traced]:  # type: ignore[override]
        return self._located(super().rsplit(sep, maxsplit), len(sep or ""))

    def splitlines(self, keepends: bool = False) -> list[Traced]:  # type: ignore[override]
        return self._located(super().splitlines(keepends))

    def partition(self, sep: str, /) -> tuple[Traced, ...]:  # type: ignore[override]
        return tuple(self._located(super().partition(sep)))

    def rpartition(self, sep: str, /) -> tuple[Traced, ...]:  # type: ignore[override]
        return tuple(self._located(super().rpartition(sep)))

    def lstrip(self, chars: str | None = None, /) -> Traced:
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None, /) -> Traced:
        return self[: len(super().rstrip(chars))]

    def strip(self, chars: str | None = None, /) -> Traced:
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str, /) -> Traced:
        return self[len(prefix) :] if prefix and self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> Traced:
        return self[: -len(suffix)] if suffix and self.endswith(suffix) else self

    def lower(self) -> Traced:
        return self.like(super().lower())

    def upper(self) -> Traced:
        return self.like(super().upper())

    def title(self) -> Traced:
        return self.like(super().title())

    def capitalize(self) -> Traced:
        return self.like(super().capitalize())

    def swapcase(self) -> Traced:
        return self.like(super().swapcase())

    def casefold(self) -> Traced:
        return self.like(super().casefold())

    def like(self, text: str) -> Traced:
        """`text`, which has another case."""
        if len(text) == len(self):
            return Traced(text, self._origins)
        first = self._origins[:1]
        return Traced(text, first * len(text) if set(self._origins) == set(first) else None)

    def _located(self, pieces: Iterable[str], gap: int = 0) -> list[Traced]:
        """Pieces of this text, in order, `gap` characters or blanks apart."""
        made, at = [], 0
        for piece in pieces:
            start = self.find(piece, at)
            made.append(self[start : start + len(piece)])
            at = start + len(piece) + gap
        return made


def origins(text: str) -> bytes:
    found: bytes | None = getattr(text, "_origins", None)
    return bytes([UNKNOWN]) * len(text) if found is None else found


def written(text: str, origin: int) -> Traced:
    return Traced(text, bytes([origin]) * len(text))


def as_text(value: Any) -> Traced:
    """As a template writes a value; that of a number, list or object counts as a client's."""
    if isinstance(value, Traced):
        return value
    if isinstance(value, str):
        return Traced(str(value), origins(value))
    return written(str(value), CLIENT)


def join(parts: Iterable[Any]) -> Traced:
    return Traced().join(map(as_text, parts))


def filled(form: Traced, field: str, values: Sequence[Any], text: str) -> Traced:
    """`text`: the form with the values in its fields."""
    pieces = form.split(field)
    if len(pieces) != len(values) + 1 or any(c in piece for piece in pieces for c in "%{}"):
        return Traced(text)
    made = pieces[0] + join(as_text(v) + p for v, p in zip(values, pieces[1:], strict=True))
    return made if made == text else Traced(text)


def trace(value: Any, origin: int) -> Any:
    """JSON, with the origin of all its texts and keys."""
    if isinstance(value, str):
        return written(value, origin)
    if isinstance(value, list | tuple):
        return type(value)(trace(item, origin) for item in value)
    if isinstance(value, dict):
        return {trace(k, origin): trace(v, origin) for k, v in value.items()}
    return value


constant: Callable[[str], Traced] = lru_cache(1 << 12)(lambda text: written(text, OWN))
