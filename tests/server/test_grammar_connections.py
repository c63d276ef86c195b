"""Connections of the grammar processes: what their ends count, keep and wait for."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest
from grammar_kit import byte_level, vocabulary
from waiting import limit

from kvline_server.grammars import matchers, messages
from kvline_server.grammars.compiler import Compiler
from kvline_server.grammars.grammar import Grammar
from kvline_server.grammars.keeper import Keeper
from kvline_server.grammars.matchers import Matchers
from kvline_server.grammars.messages import Compile, Compiled, Message, Release, Tried, Wanted
from kvline_server.grammars.service import Connection
from kvline_server.ipc import frames
from kvline_server.options.grammars import SMALL

DIGITS = Grammar("regex", "[0-9]{4}")


def test_a_process_that_does_not_answer_is_waited_for_once(tmp_path: Path) -> None:
    """Not by each sequence, while the engine makes no step."""
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        made = Matchers(str(tmp_path / "socket"), os.memfd_create("rows"), 64)
        began = time.monotonic()
        for id in range(128):
            made.begin(id, b"key")
        assert time.monotonic() - began < limit(1)
        made.ask([Wanted(id, [], [], id) for id in range(64)])
        assert set(made.wait().failed.values()) == {matchers.STARTING}
        made.close()


def test_a_grammar_whose_answer_comes_as_its_request_leaves_is_given_back(tmp_path: Path) -> None:
    async def work() -> list[Message]:
        heard: list[Message] = []
        ended = asyncio.Event()

        async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(asyncio.IncompleteReadError):
                while True:
                    heard.append(messages.decode(await frames.receive(reader)))
            writer.close()
            ended.set()

        path = str(tmp_path / "socket")
        async with await asyncio.start_unix_server(hear, path):
            compiler = Compiler(path, limit(20))
            request = asyncio.create_task(compiler._compile(DIGITS))
            while not compiler._waiting:
                await asyncio.sleep(0)
            compiler._take(Compiled(0, b"key"))
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request
            await compiler.close()
            await ended.wait()
        return heard

    assert asyncio.run(work()) == [Compile(0, DIGITS), Release(b"key")]


def test_a_grammar_compiled_anew_is_kept_as_often_as_it_was_asked_for(tmp_path: Path) -> None:
    """One connection keeps it before and after it is dropped, as where its lexer broke."""
    known = vocabulary(tmp_path / "model", byte_level())

    async def tried(grammar: Grammar) -> Tried:
        return Tried(0, size=1 << 10)

    async def work() -> None:
        keeper, (ours, theirs) = Keeper(known, SMALL, tried), socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        connection = Connection(keeper, "", 0, reader, writer)
        entries, key = [], DIGITS.key()
        for id in range(2):
            await connection._compile(Compile(id, DIGITS))
            entry = keeper.cache.get(key)
            assert entry is not None
            entries.append(entry)
            keeper.cache.drop(entry)
        assert [entry.pins for entry in entries] == [1, 1]
        for _ in range(2):
            connection._release(key)
        assert [entry.used for entry in entries] == [False, False]
        assert not connection.pinned
        writer.close()
        theirs.close()

    asyncio.run(work())
