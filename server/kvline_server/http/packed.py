"""Prompt logprobs as base64 of little-endian arrays: this server's extension of the OpenAI API.

The usual form makes a Python object of every number; these are copied as they are.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from kvline_server.engine.messages import PackedScores


def base64_arrays(scores: PackedScores | None, top: int) -> dict[str, Any]:
    """count, top, and base64 of: tokens int32, logprobs float32, ranks int32, each [count]; top_ids
    int32 and top_logprobs float32, each [count, top]. Without scores the count is 0."""
    made = scores or PackedScores(0, top, b"", b"", b"", b"", b"")
    return {
        "count": made.count,
        "top": top,
        "tokens": _text(made.tokens),
        "logprobs": _text(made.values),
        "ranks": _text(made.ranks),
        "top_ids": _text(_narrow(made.top_ids, made.top, top)),
        "top_logprobs": _text(_narrow(made.top_values, made.top, top)),
    }


def _narrow(data: bytes, have: int, want: int) -> bytes:
    """The first `want` of `have` columns of four bytes; echo may have asked the engine for more."""
    if have == want:
        return data
    return np.frombuffer(data, np.int32).reshape(-1, have)[:, :want].tobytes()


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
