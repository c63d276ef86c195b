"""HTTP's connection to the process that compiles grammars. For one event loop.

A request has its grammar compiled before it is admitted, and keeps it until it has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager

from kvline_server.errors import InvalidFrame
from kvline_server.grammars import messages
from kvline_server.grammars.grammar import Grammar
from kvline_server.grammars.messages import Compile, Compiled, Refused, Release, encode
from kvline_server.ipc import frames
from kvline_server.options.grammars import HTTP_SECONDS

Answer = Compiled | Refused
ENDED = "the process that compiles grammars ended, and starts again"


class NotServed(Exception):
    """The grammar cannot be served, whenever it is asked for: a 400."""


class NotNow(Exception):
    """It could be served another time: a 503."""


class Compiler:
    def __init__(self, path: str, seconds: float = HTTP_SECONDS) -> None:
        """`path`: of the socket to which the process listens."""
        self._path, self._seconds = path, seconds
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._connecting = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None

    async def compiled(self, grammar: Grammar) -> AbstractContextManager[bytes]:
        """The grammar's key, for which it is kept within. Raises NotServed, NotNow."""
        return self._kept(*await self._compile(grammar))

    @contextlib.contextmanager
    def _kept(self, writer: asyncio.StreamWriter, key: bytes) -> Iterator[bytes]:
        try:
            yield key
        finally:
            if writer is self._writer:  # else it is kept no more
                writer.write(encode(Release(key)))

    async def _compile(self, grammar: Grammar) -> tuple[asyncio.StreamWriter, bytes]:
        id = next(self._ids)
        try:
            async with asyncio.timeout(self._seconds):
                writer, answer = await self._answer(id, grammar)
        except TimeoutError:
            raise NotNow(f"the grammar was not compiled within {self._seconds:g} s") from None
        except OSError:
            raise NotNow(ENDED) from None
        if isinstance(answer, Compiled):
            return writer, answer.key
        raise NotNow(answer.reason) if answer.later else NotServed(answer.reason)

    async def _answer(self, id: int, grammar: Grammar) -> tuple[asyncio.StreamWriter, Answer]:
        writer = await self._connected()
        answer = self._waiting[id] = asyncio.get_running_loop().create_future()
        writer.write(encode(Compile(id, grammar)))
        try:
            return writer, await answer
        except asyncio.CancelledError:  # its time is over, or its client has left
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                self._return(writer, answer.result())
            raise
        finally:
            del self._waiting[id]

    def _return(self, writer: asyncio.StreamWriter, answer: Answer) -> None:
        """One that nobody waits for any more."""
        if isinstance(answer, Compiled) and writer is self._writer:
            writer.write(encode(Release(answer.key)))

    async def _connected(self) -> asyncio.StreamWriter:
        async with self._connecting:
            if self._writer is None:
                reader, self._writer = await asyncio.open_unix_connection(self._path)
                self._reading = asyncio.create_task(self._read(reader))
            return self._writer

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Until the process ends, which ends all that is waited for."""
        with contextlib.suppress(asyncio.IncompleteReadError, OSError, InvalidFrame):
            while True:
                answer = messages.decode(await frames.receive(reader))
                if isinstance(answer, Compiled | Refused):
                    self._take(answer)
        assert self._writer is not None
        self._writer.close()
        self._writer = None
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ConnectionResetError())

    def _take(self, answer: Answer) -> None:
        future = self._waiting.get(answer.id)
        if future is not None and not future.done():
            future.set_result(answer)
        elif self._writer is not None:
            self._return(self._writer, answer)

    async def close(self) -> None:
        if self._reading is not None and self._writer is not None:
            self._writer.close()
            await self._reading
