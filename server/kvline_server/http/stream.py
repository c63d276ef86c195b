"""Server-sent events: merges the choices of one request into one stream.

A client that disconnects cancels the generator, which closes every choice and aborts its sequence.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing, suppress
from typing import Any

from kvline_server.http.envelope import Chunks, Route, error_event
from kvline_server.http.errors import ApiError, EngineFailed
from kvline_server.http.pieces import Answer
from kvline_server.ipc.sampling_params import SamplingParams

log = logging.getLogger("kvline")
UNREAD_BYTES = 16 << 10  # buffered here; what follows waits in engine_client, which limits it
Jobs = list[tuple[list[int], SamplingParams]]


async def events(work: Route[Any], jobs: Jobs, holding: ExitStack) -> AsyncGenerator[bytes, None]:
    """The event stream of a request. `holding` is closed when it ends, for any reason. An error
    becomes an event, because the status line has been sent."""
    with suppress(ApiError), holding:
        chunks = Chunks(work, [Answer() for _ in jobs])
        for opening in work.opening(chunks):
            yield opening
        try:
            async with aclosing(_parts(work, jobs, chunks)) as parts:
                async for part in parts:
                    yield part
        except Exception as failure:
            error = api_error(failure)
            yield error_event(error)
            if error is failure:
                raise
            raise error from failure
        options = work.request.stream_options
        if options is not None and options.include_usage:
            yield chunks.last()
        yield b"data: [DONE]\n\n"


def api_error(failure: Exception) -> ApiError:
    """The error to send to the client: the first ApiError, else a 500, whose cause is logged."""
    failures = failure.exceptions if isinstance(failure, ExceptionGroup) else (failure,)
    for error in failures:
        if isinstance(error, ApiError):
            return error
    log.error("a request failed inside the server", exc_info=failure)
    return EngineFailed("the request failed inside the server")


def _ignore_error(task: asyncio.Task[None]) -> None:
    """Retrieves an error that came after the client had left, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


def _parts(work: Route[Any], jobs: Jobs, chunks: Chunks) -> AsyncGenerator[bytes, None]:
    """A single choice needs no task and no buffer of its own."""
    if len(jobs) == 1:
        return work.events(0, *jobs[0], chunks)
    return _merge(work, jobs, chunks)


async def _merge(work: Route[Any], jobs: Jobs, chunks: Chunks) -> AsyncGenerator[bytes, None]:
    queue: asyncio.Queue[bytes | None] = asyncio.Queue()
    room = asyncio.Event()
    turn = asyncio.Lock()  # choices take turns, in the order in which they came
    unread = 0

    async def drain(index: int, prompt: list[int], params: SamplingParams) -> None:
        nonlocal unread
        async with aclosing(work.events(index, prompt, params, chunks)) as parts:
            async for part in parts:
                async with turn:
                    while unread >= UNREAD_BYTES:
                        room.clear()
                        await room.wait()
                unread += len(part)
                queue.put_nowait(part)

    async def all_choices() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for index, (prompt, params) in enumerate(jobs):
                    group.create_task(drain(index, prompt, params))
        finally:
            queue.put_nowait(None)

    task = asyncio.create_task(all_choices())
    task.add_done_callback(_ignore_error)
    try:
        while (part := await queue.get()) is not None:
            yield part
            unread -= len(part)
            room.set()
        await task
    finally:
        task.cancel()
