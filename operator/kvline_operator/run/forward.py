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


class Forward:
    def __init__(self, port: int, holder: Callable[[], str]) -> None:
        """`holder` is host:port of the holder's page; empty where nobody serves one. Raises OSError
        where the port is taken."""
        self._socket = listen("", port)
        self._holder = holder
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._pass_on, sock=self._socket)

    def close(self) -> None:
        """Frees the port; connections that were passed on stay."""
        if self._server is not None:
            self._server.close()
        self._socket.close()

    async def _pass_on(self, client: StreamReader, to_client: StreamWriter) -> None:
        host, _, port = self._holder().rpartition(":")
        with closing(to_client), suppress(OSError, TimeoutError):  # the client sees that it closes
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
