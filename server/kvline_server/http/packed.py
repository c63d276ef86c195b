"""Prompt logprobs as base64 of little-endian arrays: this server's extension of the OpenAI API.

The JSON form needs a Python object per number; here arrays are encoded as bytes, some rows at a
time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvline_server.engine.messages import PackedScores
from kvline_server.http.later import LaterBase64
from kvline_server.http.scores import NUMBER

ROWS = 384  # encoded at a time; a multiple of three, as LaterBase64 requires


def base64_arrays(scores: PackedScores | None, top: int) -> dict[str, Any]:
    """count, top, and base64 of: tokens int32, logprobs float32, ranks int32, each [count]; top_ids
    int32 and top_logprobs float32, each [count, top]. Without scores the count is 0."""
    made = scores or PackedScores(0, top, b"", b"", b"", b"", b"")
    return {
        "count": made.count,
        "top": top,
        "tokens": _array(made.tokens),
        "logprobs": _array(made.values),
        "ranks": _array(made.ranks),
        "top_ids": _array(made.top_ids, made.top, top),
        "top_logprobs": _array(made.top_values, made.top, top),
    }


def _array(data: bytes, have: int = 1, want: int = 1) -> LaterBase64:
    """The first `want` of `have` columns; with echo the engine may return more."""

    def parts() -> Iterator[bytes]:
        step = ROWS * NUMBER * have
        for start in range(0, len(data), step) if have else ():
            some = data[start : start + step]
            if have != want:
                some = np.frombuffer(some, np.int32).reshape(-1, have)[:, :want].tobytes()
            yield some

    return LaterBase64(parts)
