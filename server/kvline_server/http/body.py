"""A request's bytes to a JSON object, refusing what JSON readers usually let through."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from itertools import islice
from typing import Any

from starlette.requests import Request

from kvline_server.http.errors import BadRequest, TimedOut, TooLarge, TooMany, UnsupportedType
from kvline_server.ipc.totals import BODY_BYTES, Totals
from kvline_server.options.clients import FREE_BYTES, ClientLimits

MAX_BODY_BYTES = 2 << 20
MAX_VALUES = 1 << 15  # texts, lists and objects in a body: 2 MiB of empty lists take 70 MiB
_FIRSTS = (b'"', b"[", b"{")  # of a value
_VALUE = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]', re.DOTALL)


class Bodies:
    """Bodies of all requests: bounded in time, each in size, and all together until their requests
    end, because a request keeps what came in its body."""

    def __init__(self, limits: ClientLimits, totals: Totals) -> None:
        self.limits = limits
        self.totals = totals
        self._large = asyncio.Semaphore(limits.parsing)
        self._small = asyncio.Semaphore(limits.small)

    @contextmanager
    def hold(self) -> Iterator[Body]:
        """The body of one request, while it is under way."""
        body = Body(self)
        try:
            yield body
        finally:
            if body.held:
                self.totals.give((BODY_BYTES, body.held))

    def turn(self, size: int) -> AbstractAsyncContextManager[None]:
        """A turn to be parsed and tokenised, which takes many times a body's size."""
        return self._small if size <= FREE_BYTES else self._large


class Body:
    def __init__(self, bodies: Bodies) -> None:
        self.all = bodies
        self.held = 0  # bytes

    async def read(self, request: Request, most: int = MAX_BODY_BYTES) -> bytearray:
        """Of at most so many bytes."""
        declared = request.headers.get("content-length", "0")
        if int(declared) > most:
            raise TooLarge(f"the body is larger than {most} bytes")
        now, limits = asyncio.get_running_loop().time, self.all.limits
        end = now() + limits.body
        body = bytearray()
        try:
            async with asyncio.timeout_at(min(now() + limits.body_pause, end)) as patience:
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > most:
                        raise TooLarge(f"the body is larger than {most} bytes")
                    self._hold(max(0, len(body) - FREE_BYTES) - self.held)
                    patience.reschedule(min(now() + limits.body_pause, end))
        except TimeoutError:
            raise TimedOut("the body of the request did not come in time") from None
        return body

    def give(self, nbytes: int) -> None:
        """What the request no longer keeps of it."""
        nbytes = min(nbytes, self.held)
        self.all.totals.give((BODY_BYTES, nbytes))
        self.held -= nbytes

    def _hold(self, grown: int) -> None:
        if not grown:
            return
        if not self.all.totals.take((BODY_BYTES, grown, self.all.limits.body_bytes)):
            raise TooMany("too many large bodies are under way; try again later")
        self.held += grown


async def read_json(request: Request, body: Body, most: int = MAX_BODY_BYTES) -> bytearray:
    """The bytes of a body that should be JSON; raises an ApiError that says what is wrong."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise UnsupportedType("Content-Type must be application/json")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedType("Content-Encoding is not supported")
    return await body.read(request, most)


def count_values(raw: bytes | bytearray, most: int) -> int:
    """Texts, lists and objects of a JSON text, `most` at most; it need not be valid."""
    return sum(1 for _ in islice(_VALUE.finditer(raw), most))


def parse_object(raw: bytes | bytearray) -> dict[str, Any]:
    """Strict JSON: UTF-8, unique keys, finite numbers, no lone surrogate."""
    # Counting their first characters is faster, and counts the values at least once.
    most = sum(map(raw.count, _FIRSTS))
    if most > MAX_VALUES and count_values(raw, MAX_VALUES + 1) > MAX_VALUES:
        raise BadRequest(f"the body has more than {MAX_VALUES} texts, lists and objects")
    beyond: list[str] = []  # numbers out of range

    def number(text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            beyond.append(text[:40])
        return value

    try:
        text = raw.decode("utf-8")
        if not text.strip():
            raise BadRequest("the body is empty")
        value = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_float=number,
        )
        if not isinstance(value, dict):
            raise BadRequest("the body must be a JSON object")
        if beyond or "\\u" in text:
            for name, field in value.items():
                _check_writable(name, field, beyond)
    except UnicodeError:
        raise BadRequest("the body is not valid UTF-8 text") from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise BadRequest(f"the body is not valid JSON: {error.msg}, {place}") from None
    except RecursionError:
        raise BadRequest("the body has lists and objects too deep in each other") from None
    except ValueError:  # the interpreter's limit
        raise BadRequest("the body has an integer of too many digits") from None
    return value


def _check_writable(name: str, field: Any, beyond: list[str]) -> None:
    """Raises BadRequest with the field's name where it has half of a surrogate pair, or a number
    `beyond` the range."""
    try:
        json.dumps({name: field}, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        wrong = f"{half} is half of a surrogate pair, which no text may have"
    except ValueError:
        wrong = f"the number {beyond[0]} is out of range"
    else:
        return
    param = _printable(name)
    raise BadRequest(f"{param or 'the body'}: {wrong}", param)


def _printable(name: str) -> str | None:
    """A field's name for an error, which is UTF-8 and short."""
    return name[:100] if name.isprintable() else None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise BadRequest(f"the key {key[:40]!r} stands twice", _printable(key))
        out[key] = value
    return out


def _no_constant(text: str) -> float:
    raise BadRequest(f"{text} is not a JSON number")
