"""From the engine's logprob arrays to an answer's JSON, with few Python objects at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvline_server.ipc.messages import PackedScores

LOWEST_LOGPROB = -9999.0  # JSON has no -inf
TOKENS = 32  # unpacked at a time
NUMBER = 4  # bytes of an int32 or float32
ENTRY = 400  # bytes that an output token's arrays take beside their numbers


@dataclass(frozen=True, slots=True)
class TokenScore:
    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


def held(tokens: int, top: int) -> int:
    """Bytes of the logprobs of `tokens` tokens until they are sent."""
    return tokens * NUMBER * (3 + 2 * top)


def held_outputs(parts: list[PackedScores]) -> int:
    """The same of output tokens, each with arrays of its own."""
    return sum(held(part.count, part.top) + ENTRY for part in parts)


def unpack(parts: list[PackedScores]) -> Iterator[TokenScore]:
    for part in parts:
        for start in range(0, part.count, TOKENS):
            yield from _unpack(cut(part, start, start + TOKENS))


def chosen(parts: list[PackedScores]) -> Iterator[tuple[int, float]]:
    """Token ids and their logprobs, without alternatives."""
    for part in parts:
        tokens = np.frombuffer(part.tokens, np.int32).tolist()
        yield from zip(tokens, _finite(part.values).tolist(), strict=True)


def between(parts: list[PackedScores], start: int, end: int) -> list[PackedScores]:
    """Tokens start..end of all."""
    out, at = [], 0
    for part in parts:
        first, last = max(start - at, 0), min(end - at, part.count)
        if first < last:
            out.append(cut(part, first, last))
        at += part.count
    return out


def cut(part: PackedScores, start: int, end: int) -> PackedScores:
    """Tokens start..end."""
    one, row = slice(start * NUMBER, end * NUMBER), NUMBER * part.top
    table = slice(start * row, end * row)
    count = max(0, min(end, part.count) - start)
    return PackedScores(
        count,
        part.top,
        part.tokens[one],
        part.values[one],
        part.ranks[one],
        part.top_ids[table],
        part.top_values[table],
    )


def _unpack(packed: PackedScores) -> list[TokenScore]:
    shape = (packed.count, packed.top)
    ids = np.frombuffer(packed.top_ids, np.int32).reshape(shape).tolist()
    tops = _finite(packed.top_values).reshape(shape).tolist()
    columns = zip(
        np.frombuffer(packed.tokens, np.int32).tolist(),
        _finite(packed.values).tolist(),
        np.frombuffer(packed.ranks, np.int32).tolist(),
        ids,
        tops,
        strict=True,
    )
    return [
        TokenScore(token, value, rank, list(zip(row, row_values, strict=True)))
        for token, value, rank, row, row_values in columns
    ]


def _finite(values: bytes) -> np.ndarray:
    return np.maximum(np.frombuffer(values, np.float32), LOWEST_LOGPROB)
