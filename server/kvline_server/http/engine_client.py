"""The HTTP process's line to the engine: submit, follow, abort."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator

from kvline_server.engine import messages
from kvline_server.engine.messages import Abort, Delta, Deltas, Submit
from kvline_server.engine.request import SamplingParams
from kvline_server.http.errors import EngineFailed


class EngineClient:
    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._queues: dict[int, asyncio.Queue[Delta | None]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def connect(self, path: str) -> None:
        reader, self._writer = await asyncio.open_unix_connection(path)
        self._reading = asyncio.create_task(self._read(reader))

    async def generate(
        self, tokens: list[int], params: SamplingParams
    ) -> AsyncGenerator[list[Delta], None]:
        """Deltas until the sequence finishes, at each turn all that have come since the last: a
        process that falls behind catches up by saying more at once. Leaving early aborts the
        sequence in the engine."""
        writer = self._writer
        if writer is None:
            raise EngineFailed("the engine has ended")
        id = next(self._ids)
        queue: asyncio.Queue[Delta | None] = asyncio.Queue()
        self._queues[id] = queue
        finished = False
        try:
            writer.write(messages.encode(Submit(id, tokens, params)))
            while not finished:
                deltas = [await queue.get()]
                while not queue.empty():
                    deltas.append(queue.get_nowait())
                known = [delta for delta in deltas if delta is not None]
                finished = bool(known) and known[-1].finish is not None
                if known:
                    yield known
                if len(known) < len(deltas) and not finished:
                    raise EngineFailed("the engine ended while it worked on this request")
        finally:
            del self._queues[id]
            if not finished and self._writer is not None:
                self._writer.write(messages.encode(Abort(id)))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                length = int.from_bytes(await reader.readexactly(4), "little")
                message = messages.decode(await reader.readexactly(length))
                if isinstance(message, Deltas):
                    for delta in message.items:
                        queue = self._queues.get(delta.id)
                        if queue is not None:
                            queue.put_nowait(delta)
        self._writer = None
        for queue in self._queues.values():
            queue.put_nowait(None)
