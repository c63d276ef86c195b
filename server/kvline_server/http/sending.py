"""A whole answer: awaited while its client is there, and its JSON, encoded off the event loop; at
once where it is short, else as it is sent."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from kvline_server.http.later import encode
from kvline_server.http.stream import api_error

T = TypeVar("T")
JSON = "application/json"
SHORT = 64 << 10  # bytes, which a client that does not read may keep waiting


async def respond(
    make: Callable[[], Any], holding: ExitStack, headers: Mapping[str, str] | None = None
) -> Response:
    """`make` gives what is encoded. `holding` is closed when a long answer has been sent, and left
    to the caller where it is short."""
    pieces = await asyncio.to_thread(lambda: encode(make()))
    whole = await asyncio.to_thread(next, pieces)
    more = next(pieces, None)
    if more is None and len(whole) <= SHORT:
        return Response(whole, media_type=JSON, headers=headers)
    begun = (whole,) if more is None else (whole, more)
    body = _sent(itertools.chain(begun, pieces), holding.pop_all())
    return StreamingResponse(body, media_type=JSON, headers=headers)


async def _sent(pieces: Iterator[bytes], holding: ExitStack) -> AsyncGenerator[bytes, None]:
    with holding:
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield piece


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, cancelled when the client leaves first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return await task
    except ExceptionGroup as group:
        raise api_error(group) from group
    finally:
        gone.cancel()
        task.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
