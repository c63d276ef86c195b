"""An HTTP process's connection to the engine: submit, receive, abort."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING

from kvline_server.http.errors import ApiError, EngineFailed, GrammarFailed, NotRead
from kvline_server.http.shared_prompts import SharedPrompts
from kvline_server.ipc import messages
from kvline_server.ipc.histogram import Latencies
from kvline_server.ipc.messages import (
    WRONG_PIXELS,
    Abort,
    Delta,
    Deltas,
    PackedScores,
    PromptScores,
    Released,
    Submit,
)
from kvline_server.ipc.sampling_params import SamplingParams

if TYPE_CHECKING:
    from kvline_server.http.image_store import Held

ENDED = "the engine ended while it worked on this request"


class Received:
    """Deltas of one sequence that its request has not taken yet."""

    def __init__(self) -> None:
        self.items: list[Delta | ApiError] = []
        self.tokens = 0  # of the items
        self.prompt_scores: list[PackedScores] = []  # that came before the first delta
        self.came_at = 0.0  # the last delta
        self._awaited: asyncio.Future[None] | None = None  # the request waits for the next delta

    def put(self, item: Delta | ApiError) -> None:
        self.items.append(item)
        self.tokens += len(item.tokens) if isinstance(item, Delta) else 0
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(None)

    async def take(self) -> list[Delta | ApiError]:
        """Waits for a delta; returns all that have come since the last call."""
        if not self.items:
            self._awaited = asyncio.get_running_loop().create_future()
            await self._awaited
            self._awaited = None
        items, self.items, self.tokens = self.items, [], 0
        return items

    def overflows(self, limit: int) -> bool:
        """Whether `limit` tokens wait: the client reads too slowly, or not at all."""
        return self._awaited is None and self.tokens >= limit


NOT_FINITE = "the model computed no finite numbers for this request, so there is no next token"


def _failure(reason: str) -> ApiError:
    """Of a sequence; `reason` is that of messages.Delta."""
    if reason == WRONG_PIXELS:
        return EngineFailed(f"{reason}; this is a fault of the server", code="image_lost")
    if reason:
        return GrammarFailed(f"the answer could not follow its grammar to the end: {reason}")
    return EngineFailed(NOT_FINITE, code="not_finite")


class EngineClient:
    def __init__(self, unread_tokens: int, ids: Iterator[int] | None = None) -> None:
        """`ids`: of sequences; no other process has the same."""
        self.lost = asyncio.Event()
        self.why_lost = ""
        self.latencies = Latencies()
        self._frame_at = -1.0  # when the last deltas came
        self._unread_tokens = unread_tokens
        self._ids = itertools.count(1) if ids is None else ids
        self._prompts = SharedPrompts()
        self._received: dict[int, Received] = {}
        self._reads: dict[int, Callable[[], None]] = {}  # to call when it reads no pixels
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._ended: ApiError | None = None

    @property
    def connected(self) -> bool:
        return self._writer is not None

    async def connect(self, connection: socket.socket, page_size: int) -> None:
        self._prompts.page_size = page_size
        reader, self._writer = await asyncio.open_connection(sock=connection)
        self._reading = asyncio.create_task(self._read(reader))

    async def generate(
        self, tokens: list[int], params: SamplingParams, images: Held | None = None
    ) -> AsyncGenerator[list[Delta], None]:
        """Deltas until the sequence finishes. Leaving early aborts it in the engine, which may read
        pixels of `images` for a moment more."""
        with self._prompts.share(tokens) as shared:
            params = await shared.params(tokens, params)
            async with aclosing(self._follow(tokens, params, images)) as batches:
                async for deltas in batches:
                    shared.receive(deltas)
                    yield deltas

    async def _follow(
        self, tokens: list[int], params: SamplingParams, images: Held | None
    ) -> AsyncGenerator[list[Delta], None]:
        if self._writer is None or self._ended is not None:
            raise self._ended or EngineFailed("the engine has ended")
        id = next(self._ids)
        received = self._received[id] = Received()
        finished = False
        try:
            sent = [] if images is None else images.sent
            if images is not None:
                self._reads[id] = images.read()
            self._writer.write(messages.encode(Submit(id, tokens, params, sent)))
            while not finished:
                items = await received.take()
                known = [item for item in items if isinstance(item, Delta)]
                finished = bool(known) and known[-1].finish is not None
                if finished and known[-1].finish == "error":
                    raise _failure(known[-1].reason)
                if known:
                    yield known
                for item in items:
                    if isinstance(item, ApiError) and not finished:
                        raise item
        finally:
            self._received.pop(id, None)
            if not finished:
                self._abort(id)

    def end(self, error: ApiError) -> None:
        """Fails all sequences with `error`, and every later one."""
        self._ended = self._ended or error
        for id, received in self._received.items():
            received.put(error)
            self._abort(id)
        self._received.clear()

    def _abort(self, id: int) -> None:
        if self._writer is not None:
            self._writer.write(messages.encode(Abort(id)))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Reads deltas. When this ends, for any reason, every request fails; none hangs."""
        try:
            while True:
                message = await messages.read(reader)
                if isinstance(message, Deltas):
                    self._dispatch(message)
                elif isinstance(message, PromptScores) and message.id in self._received:
                    self._received[message.id].prompt_scores.append(message.scores)
                elif isinstance(message, Released):
                    for id in message.ids:
                        self._reads.pop(id)()
        except (asyncio.IncompleteReadError, OSError):
            self.why_lost = "the engine closed its connection to the HTTP process"
        except Exception as error:
            self.why_lost = f"invalid message from the engine: {error}"
        finally:
            if self._writer is not None:
                self._writer.close()
            self._writer = None
            self.end(EngineFailed(ENDED))
            self.lost.set()

    def _dispatch(self, message: Deltas) -> None:
        """Most sequences have a token in each frame: one duration counts for all of them."""
        now, before, together = time.monotonic(), self._frame_at, 0
        self._frame_at = now
        for delta in message.items:
            received = self._received.get(delta.id)
            if received is None:
                continue
            if received.came_at == before:
                together += 1
            elif received.came_at:
                self.latencies.between_tokens.add(now - received.came_at)
            received.came_at = now
            if received.overflows(self._unread_tokens):
                received.put(NotRead("the answer was not read as fast as it came"))
                del self._received[delta.id]
                self._abort(delta.id)
            else:
                if received.prompt_scores:
                    delta.prompt_scores, received.prompt_scores = received.prompt_scores, []
                received.put(delta)
        if together:
            self.latencies.between_tokens.add(now - before, together)
