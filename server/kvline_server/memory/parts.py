"""Memory that its owner keeps on a rank's device, by name: a part of the sizing report. Sizing adds
parts up by how their bytes come, and knows no owner."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OwnedPart:
    name: str  # as kvline_contract.memory has it
    fixed: int = 0  # bytes, whatever the size of the KV cache
    per_sequence: int = 0  # bytes of the KV cache for each that may run
    per_row: int = 0  # bytes of the KV cache for each of a step, rows of whole pages
    per_token: int = 0  # bytes for each token of the KV cache
    lent: bool = False  # taken by others, and in service alone: sizing keeps it free
    outside: bool = False  # of what is counted as its process's (Usage.now)
    detail: str | None = None  # in the report


def loaded(parts: Iterable[OwnedPart]) -> int:
    """Bytes that are on the device before any KV cache."""
    return sum(part.fixed for part in parts if not part.lent)


def outside(parts: Iterable[OwnedPart]) -> int:
    return sum(part.fixed for part in parts if part.outside)


def lent(parts: Iterable[OwnedPart], tokens: int) -> int:
    """Bytes to keep free beside a KV cache of so many tokens."""
    return sum(part.fixed + tokens * part.per_token for part in parts if part.lent)


def per_token(parts: Iterable[OwnedPart]) -> int:
    """Bytes for each token of the KV cache, those to keep free included."""
    return sum(part.per_token for part in parts)


def growing(parts: Iterable[OwnedPart], tokens: int, sequences: int, rows: int) -> int:
    """Bytes of what is mapped with a KV cache, and follows its size."""
    return sum(
        tokens * part.per_token + sequences * part.per_sequence + rows * part.per_row
        for part in parts
    )


def fitting(parts: Iterable[OwnedPart], nbytes: int, sequences: int, rows: int) -> int:
    """Tokens of a KV cache for so many sequences, and steps of so many rows, that so many bytes
    hold, or less than none."""
    every = tuple(parts)
    return (nbytes - growing(every, 0, sequences, rows)) // per_token(every)
