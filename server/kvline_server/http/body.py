"""A request's bytes to a JSON object, refusing what JSON readers usually let through."""

from __future__ import annotations

import json
import math
from typing import Any

from starlette.requests import Request

from kvline_server.http.errors import BadRequest, TooLarge, UnsupportedType

MAX_BODY_BYTES = 2 << 20


async def read_object(request: Request) -> dict[str, Any]:
    """The body as a JSON object; raises an ApiError that says what is wrong with it."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise UnsupportedType("Content-Type must be application/json")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedType("Content-Encoding is not supported")
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise TooLarge(f"the body is larger than {MAX_BODY_BYTES} bytes")
        chunks.append(chunk)
    return parse_object(b"".join(chunks))


def parse_object(raw: bytes) -> dict[str, Any]:
    """Strict JSON: UTF-8, unique keys, finite numbers, no lone surrogate."""
    try:
        text = raw.decode("utf-8")
        value = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except BadRequest:
        raise
    except UnicodeError:
        raise BadRequest("the body is not valid UTF-8 text") from None
    except (ValueError, RecursionError):
        raise BadRequest("the body is not valid JSON") from None
    if not isinstance(value, dict):
        raise BadRequest("the body must be a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise BadRequest(f"the key {key[:40]!r} stands twice", key)
        out[key] = value
    return out


def _no_constant(text: str) -> float:
    raise BadRequest(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise BadRequest("a number is out of range")
    return value
