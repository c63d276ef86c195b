"""Server-sent events: the choices of one request merged into one stream.

A client that leaves cancels the generator, which closes every choice and so aborts its sequence.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from typing import Any, Protocol

import msgspec

from kvline_server.engine.request import SamplingParams
from kvline_server.http.completions import usage
from kvline_server.http.errors import ApiError, EngineFailed
from kvline_server.http.generate import Answer

Jobs = list[tuple[list[int], SamplingParams]]


class Streamed(Protocol):
    prompts: list[list[int]]

    def events(
        self, index: int, prompt: list[int], params: SamplingParams, totals: list[Answer]
    ) -> AsyncGenerator[bytes, None]: ...

    def frame(self, choices: list[dict[str, Any]], used: dict[str, Any] | None = None) -> bytes: ...

    def opening(self, choices: int) -> list[bytes]: ...


async def events(
    work: Streamed, jobs: Jobs, include_usage: bool, holding: ExitStack
) -> AsyncGenerator[bytes, None]:
    """The whole event stream of a request. `holding` is closed at its end, whatever that is."""
    with holding:
        totals = [Answer() for _ in jobs]
        for chunk in work.opening(len(jobs)):
            yield _event(chunk)
        try:
            async for chunk in _merge(work, jobs, totals):
                yield _event(chunk)
        except ExceptionGroup as group:
            error = api_error(group)
            yield _event(msgspec.json.encode(error.body()))
            # The status line is long gone; raising lets the counters see a failure.
            raise error from group
        if include_usage:
            yield _event(work.frame([], usage(work.prompts, totals)))
        yield b"data: [DONE]\n\n"


def api_error(group: BaseExceptionGroup[BaseException]) -> ApiError:
    """What to tell a client of a group of failures: the first that was meant for it."""
    for error in group.exceptions:
        if isinstance(error, ApiError):
            return error
    return EngineFailed("the request failed inside the server")


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


async def _merge(work: Streamed, jobs: Jobs, totals: list[Answer]) -> AsyncGenerator[bytes, None]:
    queue: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def drain(index: int, prompt: list[int], params: SamplingParams) -> None:
        async with aclosing(work.events(index, prompt, params, totals)) as chunks:
            async for chunk in chunks:
                queue.put_nowait(chunk)

    async def all_choices() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for index, (prompt, params) in enumerate(jobs):
                    group.create_task(drain(index, prompt, params))
        finally:
            queue.put_nowait(None)

    task = asyncio.create_task(all_choices())
    try:
        while (chunk := await queue.get()) is not None:
            yield chunk
        await task
    finally:
        task.cancel()
