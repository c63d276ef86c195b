"""A server's HTTP part, and an engine that answers at command: no processes, no model."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from waiting import answer_of, limit

from kvline_contract.launch import ToolCallParser
from kvline_server.http.admission import Admission
from kvline_server.http.app import create_app
from kvline_server.http.body import Bodies
from kvline_server.http.engine_client import EngineClient
from kvline_server.http.generate import Generator, RequestLimits
from kvline_server.http.service import Service
from kvline_server.http.tokenizer_files import open_chat
from kvline_server.http.tokens import Tokens
from kvline_server.http.trace import Traces
from kvline_server.ipc import messages
from kvline_server.ipc.messages import Abort, Delta, Deltas, PackedScores, Submit
from kvline_server.options.clients import ClientLimits

CONTEXT = 40_960
VOCABULARY = 307


class Scripted:
    def __init__(
        self,
        folder: Path,
        max_held: int = 1 << 24,
        vocabulary: int = VOCABULARY,
        parser: ToolCallParser | None = None,
        **more: Any,
    ) -> None:
        """`parser`: of tool calls; `more`: of the service."""
        self.client = EngineClient(1000)
        self.admission = Admission(max_held=max_held)
        self.admission.open(16, 65_536)
        self.tokens = Tokens(folder)
        self.chat = open_chat(folder, self.tokens, parser=parser)
        generator = Generator(self.client, self.tokens, Traces(None), self.chat)
        limits = RequestLimits("tiny", vocabulary, CONTEXT, 20, 1 << 20)
        bodies = Bodies(ClientLimits(), self.admission.totals)
        self.service = Service(generator, self.admission, bodies, limits, 0, **more)
        self.app = create_app(self.service)
        transport = httpx.ASGITransport(self.app)
        self.http = httpx.AsyncClient(
            transport=transport, base_url="http://tiny", timeout=limit(60)
        )
        self.submitted: asyncio.Queue[Submit] = asyncio.Queue()
        self.aborted: asyncio.Queue[int] = asyncio.Queue()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Scripted]:
        here, line = socket.socketpair()
        await self.client.connect(here, 16)
        reader, self._writer = await asyncio.open_connection(sock=line)
        reading = asyncio.create_task(self._read(reader))
        async with self.http:
            yield self
        reading.cancel()
        self._writer.close()
        await self.client.lost.wait()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while True:
            message = await messages.read(reader)
            if isinstance(message, Submit):
                self.submitted.put_nowait(message)
            elif isinstance(message, Abort):
                self.aborted.put_nowait(message.id)

    async def asked(self) -> Submit:
        """The next sequence that the engine gets."""
        return await answer_of(self.submitted.get(), 30)

    def send(
        self,
        id: int,
        tokens: Sequence[int],
        finish: str | None = "stop",
        scores: PackedScores | None = None,
        cached: int = 0,
    ) -> None:
        """Output of a sequence, each token with these scores."""
        deltas = [Delta(id, [token], None, scores, [], cached) for token in tokens]
        deltas[-1].finish = finish
        self._writer.write(messages.encode(Deltas(deltas)))
