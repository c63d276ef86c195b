"""Connections of the grammar processes: what their ends count, keep and wait for."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from grammar_kit import byte_level, vocabulary
from scripted import Scripted
from waiting import limit

from kvline_server.grammars import matchers, messages, process, trial
from kvline_server.grammars.compiler import Compiler
from kvline_server.grammars.grammar import Grammar
from kvline_server.grammars.keeper import Keeper
from kvline_server.grammars.matchers import Matchers
from kvline_server.grammars.messages import (
    Compile,
    Compiled,
    Message,
    Release,
    Tried,
    Try,
    Wanted,
    encode,
)
from kvline_server.grammars.process import Trunk
from kvline_server.grammars.service import BUSY, Connection
from kvline_server.ipc import frames
from kvline_server.ipc.frames import Received
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


def test_a_client_that_leaves_while_its_grammar_is_compiled_holds_no_room(
    tiny_model: Path, tmp_path: Path
) -> None:
    """It did for as long as the grammar took, 20 s at most."""
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
    sent = json.dumps(body | {"response_format": schema}).encode()
    scope: dict[str, object] = {"type": "http", "method": "POST", "path": "/v1/chat/completions"}
    scope |= {"query_string": b"", "headers": [(b"content-type", b"application/json")]}

    async def work() -> None:
        asked = asyncio.Event()

        async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await frames.receive(reader)
            asked.set()
            await reader.read()  # it answers nothing
            writer.close()

        async def receive() -> dict[str, object]:
            if not asked.is_set() and not received:
                received.append(True)
                return {"type": "http.request", "body": sent}
            await asked.wait()
            return {"type": "http.disconnect"}

        async def send(_: object) -> None:
            """Nobody is there."""

        received = list[bool]()
        listener = await asyncio.start_unix_server(hear, tmp_path / "socket")
        compiler = Compiler(str(tmp_path / "socket"), limit(600))
        made = Scripted(tiny_model, compiler=compiler)
        async with asyncio.timeout(limit(60)):
            await made.app(scope, receive, send)
        counts = made.admission
        assert asked.is_set() and (counts.active, counts.ended, counts.aborted) == (0, 1, 1)
        await made.http.aclose()
        await compiler.close()
        listener.close()
        await listener.wait_closed()

    asyncio.run(work())


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


@pytest.fixture
def trunk(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Trunk, socket.socket]]:
    """Without a vocabulary, and beside it its child's end of their connection. It tries nothing."""
    ends: list[socket.socket] = []

    def sleeper(work: object, keep: tuple[int, ...]) -> int:
        ends.append(socket.socket(fileno=os.dup(keep[0])))
        if pid := os.fork():
            return pid
        while True:
            signal.pause()

    monkeypatch.setattr(process, "forked", sleeper)
    with closing(socket.socket()) as control, closing(socket.socket()) as listener:
        made = Trunk(None, "", replace(SMALL, trials=0), control, listener, 0, 60.0)
        yield made, ends[0]
        made._kill()
        ends[0].close()


def answers(end: socket.socket, count: int) -> list[Message]:
    """So many that have come, and no more."""
    received, found = Received(), list[Message]()
    end.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            received.add(end.recv(1 << 16))
    while (body := received.take()) is not None:
        found.append(messages.decode(body))
    assert len(found) == count
    return found


def test_a_grammar_that_nobody_waits_for_is_not_tried(
    trunk: tuple[Trunk, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, end = trunk
    made._handle(Try(1, DIGITS), 40)
    made._tend()
    answers(end, 0)
    monkeypatch.setattr(process, "HTTP_SECONDS", 0.0)
    made._tend()
    assert answers(end, 1) == [Tried(1, process.NOT_TRIED, later=True)]
    assert not made.waiting


def test_a_trial_s_answer_is_there_before_its_process_has_ended() -> None:
    """Which takes as long as giving back the memory that it shares."""
    pipe, answer = os.pipe()
    if (pid := os.fork()) == 0:
        while True:
            signal.pause()
    tried, frame = (
        trial.Trial(7, pid, pipe, time.monotonic(), bytearray()),
        encode(Tried(7, size=9)),
    )
    for piece in (frame[:5], frame[5:]):
        assert tried.answer() is None
        os.write(answer, piece)
        assert not tried.read()
    assert tried.answer() == Tried(7, size=9)
    assert tried.answer() is None, "it is given once"
    tried.kill()
    os.close(answer)
    assert tried.read() and tried.answer() is None
    assert tried.end(SMALL) is None, "its end is no other answer"


def test_texts_of_grammars_that_wait_are_bounded(trunk: tuple[Trunk, socket.socket]) -> None:
    made, end = trunk
    for id in range(5):
        made._handle(Try(id, DIGITS), 3 << 20)
    assert answers(end, 3) == [Tried(id, BUSY, later=True) for id in (2, 3, 4)]
