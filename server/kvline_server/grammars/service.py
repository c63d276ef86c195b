"""The process that keeps compiled grammars and fills masks: an event loop.

HTTP's requests for grammars and the engine's steps come on connections to one socket. What a
connection had is dropped with it. Masks are filled in the loop; what is compiled delays none.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import mmap
import os
import socket
import sys
from collections import deque
from collections.abc import Coroutine
from typing import Any

import numpy as np

from kvline_server.errors import InvalidFrame
from kvline_server.grammars import heap, messages
from kvline_server.grammars.cache import Entry
from kvline_server.grammars.compiled import GrammarRefused
from kvline_server.grammars.grammar import Grammar
from kvline_server.grammars.keeper import Keeper, Later
from kvline_server.grammars.messages import (
    Advance,
    Alive,
    Attach,
    Attached,
    Begin,
    Compile,
    Compiled,
    End,
    Refused,
    Release,
    Tried,
    Try,
    encode,
)
from kvline_server.grammars.sequences import Rows
from kvline_server.grammars.vocabulary import Vocabulary
from kvline_server.ipc import frames
from kvline_server.options.grammars import GrammarBounds

BUSY = "too many grammars wait to be compiled"
ALIVE_SECONDS = 1.0
MAX_COMPILING = 256  # grammars that a connection waits for


class Tries:
    """Grammars that the process that forked this one tries."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[Tried]] = {}
        self._ids = itertools.count()
        self._writer: asyncio.StreamWriter | None = None

    async def run(self, trunk: socket.socket) -> None:
        """Until the connection ends, and with it this process."""
        reader, self._writer = await asyncio.open_connection(sock=trunk)
        pulse = asyncio.create_task(self._beat(self._writer))
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                message = messages.decode(await frames.receive(reader))
                if isinstance(message, Tried):
                    self._waiting.pop(message.id).set_result(message)
        pulse.cancel()

    async def _beat(self, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(encode(Alive()))
            await asyncio.sleep(ALIVE_SECONDS)

    async def tried(self, grammar: Grammar) -> Tried:
        """Raises Later."""
        assert self._writer is not None
        id = next(self._ids)
        made = self._waiting[id] = asyncio.get_running_loop().create_future()
        self._writer.write(encode(Try(id, grammar)))
        answer: Tried = await made
        if answer.later:
            raise Later(answer.reason)
        return answer


class Connection:
    """Of HTTP, or the engine's."""

    def __init__(
        self,
        keeper: Keeper | None,
        unsupported: str,
        rows: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.keeper, self.unsupported, self.rows_file = keeper, unsupported, rows
        self.reader, self.writer = reader, writer
        # An entry for each Compile: a grammar that was dropped and compiled anew has another one.
        self.pinned: dict[bytes, deque[Entry]] = {}
        self.compiling: set[asyncio.Task[None]] = set()
        self.rows: Rows | None = None

    async def run(self) -> None:
        try:
            while True:
                self._handle(messages.decode(await frames.receive(self.reader)))
                await self.writer.drain()
        except (asyncio.IncompleteReadError, OSError):
            pass
        except InvalidFrame as error:
            print(f"grammars: a client sent {error}", file=sys.stderr, flush=True)
        finally:
            self._drop()

    def _handle(self, message: messages.Message) -> None:
        if isinstance(message, Compile):
            self._start(self._compile(message), message.id)
        elif isinstance(message, Release):
            self._release(message.key)
        elif isinstance(message, Attach):
            self._attach(message.rows)
        elif self.keeper is None or self.rows is None:
            raise InvalidFrame(f"{type(message).__name__}, and has not attached to any rows")
        elif isinstance(message, Advance):
            self.writer.write(encode(self.keeper.advance(message, self.rows)))
        elif isinstance(message, Begin):
            self.keeper.begin(message)
        elif isinstance(message, End):
            self.keeper.sequences.end(message.sequence)
        else:
            raise InvalidFrame(f"{type(message).__name__}, which is no request")

    def _attach(self, rows: int) -> None:
        """The engine's connection."""
        if self.keeper is None:
            self.writer.write(encode(Attached(0)))
            return
        words = self.keeper.vocabulary.words
        os.ftruncate(self.rows_file, rows * words * np.dtype(np.int32).itemsize)
        mapped = mmap.mmap(self.rows_file, 0)
        self.rows = np.frombuffer(mapped, np.int32).reshape(rows, words)
        self.keeper.engage(self)
        self.writer.write(encode(Attached(words)))

    def _start(self, work: Coroutine[Any, Any, None], id: int) -> None:
        if len(self.compiling) >= MAX_COMPILING:
            work.close()
            self.writer.write(encode(Refused(id, BUSY, later=True)))
            return
        task = asyncio.create_task(work)
        self.compiling.add(task)
        task.add_done_callback(self.compiling.discard)

    async def _compile(self, message: Compile) -> None:
        try:
            if self.keeper is None:
                raise GrammarRefused(self.unsupported)
            entry = await self.keeper.pin(message.grammar)
        except GrammarRefused as error:
            answer: messages.Message = Refused(message.id, str(error))
        except Later as error:
            answer = Refused(message.id, str(error), later=True)
        else:
            self.pinned.setdefault(entry.key, deque()).append(entry)
            answer = Compiled(message.id, entry.key)
        self.writer.write(encode(answer))

    def _release(self, key: bytes) -> None:
        entries = self.pinned.get(key)
        if entries is None:
            raise InvalidFrame("a release of what it does not keep")
        entries.popleft().pins -= 1
        if not entries:
            del self.pinned[key]

    def _drop(self) -> None:
        for task in self.compiling:
            task.cancel()
        for entry in itertools.chain.from_iterable(self.pinned.values()):
            entry.pins -= 1
        if self.keeper is not None:
            self.keeper.leave(self)
        self.writer.close()


async def serve(
    vocabulary: Vocabulary | None,
    unsupported: str,
    bounds: GrammarBounds,
    trunk: socket.socket,
    listener: socket.socket,
    rows: int,
) -> None:
    tries = Tries()
    keeper = None
    if vocabulary is not None:
        keeper = Keeper(vocabulary, bounds, tries.tried)
        heap.limit(bounds.memory)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.CancelledError):  # this process ends
            await Connection(keeper, unsupported, rows, reader, writer).run()

    trunk.setblocking(False)
    running = asyncio.create_task(tries.run(trunk))
    async with await asyncio.start_unix_server(connected, sock=listener):
        await running
