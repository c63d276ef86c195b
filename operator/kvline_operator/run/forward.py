"""A standby's page port: passes connections on to the operator that holds the Lease.

So the page's Service may have every replica behind it, and no operator needs the right to change
which of them it leads to.
"""

from __future__ import annotations

import asyncio
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable
from contextlib import closing, suppress

from kvline_contract.listening import listen

CONNECT_SECONDS = 5.0
MAX_CONNECTIONS = 64  # at once: others are closed. It bounds also a standby that leads to itself


class Forward:
    def __init__(self, port: int, holder: Callable[[], str]) -> None:
        """`holder` is host:port of the holder's page; empty where nobody serves one. Raises OSError
        where the port is taken."""
        self._socket = listen("", port)
        self._holder = holder
        self._server: asyncio.Server | None = None
        self._connections = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, sock=self._socket)

    def close(self) -> None:
        """Frees the port; connections that were passed on stay."""
        if self._server is not None:
            self._server.close()
        self._socket.close()

    async def _accept(self, client: StreamReader, to_client: StreamWriter) -> None:
        self._connections += 1
        try:
            with closing(to_client), suppress(OSError, TimeoutError):  # the client sees an end
                if self._connections <= MAX_CONNECTIONS:
                    await self._pass_on(client, to_client)
        finally:
            self._connections -= 1

    async def _pass_on(self, client: StreamReader, to_client: StreamWriter) -> None:
        host, _, port = self._holder().rpartition(":")
        async with asyncio.timeout(CONNECT_SECONDS):
            holder, to_holder = await asyncio.open_connection(host.strip("[]"), int(port or 0))
        with closing(to_holder):
            await asyncio.gather(_copy(client, to_holder), _copy(holder, to_client))


async def _copy(source: StreamReader, target: StreamWriter) -> None:
    while data := await source.read(65536):
        target.write(data)
        await target.drain()
    with suppress(OSError):
        target.write_eof()
