"""The events of a stream that fails inside the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvline_server.http import stream
from kvline_server.http.errors import ApiError, BadRequest
from kvline_server.ipc.sampling_params import SamplingParams


class Failing:
    """One chunk of each choice, then an error."""

    request = SimpleNamespace(stream_options=None)
    limits = SimpleNamespace(served_name="m", fingerprint="fp_x")
    id, created, chunk_kind = "x", 1, "text_completion"

    def __init__(self, error: Exception) -> None:
        self.error = error

    def opening(self, chunks: Any) -> list[bytes]:
        return [b"data: opening\n\n"]

    async def events(self, *_: Any) -> AsyncGenerator[bytes, None]:
        yield b"data: chunk\n\n"
        raise self.error


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize(
    ("error", "code"),
    [(BadRequest("why", "n"), b"why"), (ValueError("a bug"), b"inside the server")],
)
def test_an_error_inside_a_stream_is_its_last_event(
    choices: int, error: Exception, code: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    held = ExitStack()
    closed: list[bool] = []
    held.callback(closed.append, True)
    jobs = [([1], SamplingParams(max_tokens=1))] * choices

    async def played() -> list[bytes]:
        return [e async for e in stream.events(cast(Any, Failing(error)), jobs, held)]

    first, *chunks, last = asyncio.run(played())
    assert first == b"data: opening\n\n" and b"data: chunk\n\n" in chunks
    assert code in last and b"a bug" not in last and closed
    assert ("a bug" in caplog.text) == (not isinstance(error, ApiError))
