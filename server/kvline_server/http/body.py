"""A request's bytes to a JSON object, refusing what JSON readers usually let through."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

from starlette.requests import Request

from kvline_server.http.errors import BadRequest, TimedOut, TooLarge, TooMany, UnsupportedType
from kvline_server.options import ClientLimits

MAX_BODY_BYTES = 2 << 20
FREE_BYTES = 16 << 10  # of each body: a small one is never refused for what large ones hold


class Bodies:
    """Bodies on their way in: bounded in time, each in size, and all together."""

    def __init__(self, limits: ClientLimits) -> None:
        self.limits = limits
        self.held = 0

    async def read(self, request: Request) -> bytes:
        declared = request.headers.get("content-length", "0")
        if int(declared) > MAX_BODY_BYTES:
            raise TooLarge(f"the body is larger than {MAX_BODY_BYTES} bytes")
        now = asyncio.get_running_loop().time
        end = now() + self.limits.body
        body, held = bytearray(), 0
        try:
            async with asyncio.timeout_at(min(now() + self.limits.body_pause, end)) as patience:
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > MAX_BODY_BYTES:
                        raise TooLarge(f"the body is larger than {MAX_BODY_BYTES} bytes")
                    grown = max(0, len(body) - FREE_BYTES) - held
                    self._hold(grown)
                    held += grown
                    patience.reschedule(min(now() + self.limits.body_pause, end))
        except TimeoutError:
            raise TimedOut("the body of the request did not come in time") from None
        finally:
            self.held -= held
        return bytes(body)

    def _hold(self, grown: int) -> None:
        if self.held + grown > self.limits.body_bytes:
            raise TooMany("too many large bodies are on their way; try again later")
        self.held += grown


async def read_object(request: Request, bodies: Bodies) -> dict[str, Any]:
    """The body as a JSON object; raises an ApiError that says what is wrong with it."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise UnsupportedType("Content-Type must be application/json")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedType("Content-Encoding is not supported")
    return parse_object(await bodies.read(request))


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
