"""Prompt logprobs as base64 of little-endian arrays: this server's extension of the OpenAI API.

The JSON form needs a Python object per number; here arrays are encoded as bytes, some rows at a
time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvline_server.http.later import LaterBase64
from kvline_server.http.scores import NUMBER
from kvline_server.ipc.messages import PackedScores

ROWS = 384  # encoded at a time


def base64_arrays(scores: list[PackedScores], top: int) -> dict[str, Any]:
    """count, top, and base64 of: tokens int32, logprobs float32, ranks int32, each [count]; top_ids
    int32 and top_logprobs float32, each [count, top]. Without scores the count is 0."""
    have = scores[0].top if scores else top
    return {
        "count": sum(part.count for part in scores),
        "top": top,
        "tokens": _array([part.tokens for part in scores]),
        "logprobs": _array([part.values for part in scores]),
        "ranks": _array([part.ranks for part in scores]),
        "top_ids": _array([part.top_ids for part in scores], have, top),
        "top_logprobs": _array([part.top_values for part in scores], have, top),
    }


def _array(parts: list[bytes], have: int = 1, want: int = 1) -> LaterBase64:
    """The first `want` of `have` columns; with echo the engine may return more."""
    step = ROWS * NUMBER * have

    def chunks() -> Iterator[bytes]:
        for data in parts:
            for start in range(0, len(data), step) if have else ():
                some = data[start : start + step]
                if have != want:
                    some = np.frombuffer(some, np.int32).reshape(-1, have)[:, :want].tobytes()
                yield some

    return LaterBase64(chunks)
