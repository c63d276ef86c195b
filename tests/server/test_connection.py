"""One connection of the API port, over a real socket and an application of a few lines."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState
from waiting import answer_of

from kvline_contract.launch import Device
from kvline_server.http.connections import Connections
from kvline_server.options.clients import FREE_BYTES, ClientLimits

HEAD = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
Application = Callable[..., Any]


@asynccontextmanager
async def serving(
    app: Application, limits: ClientLimits, connections: Connections | None = None
) -> AsyncIterator[Callable[[], Awaitable[socket.socket]]]:
    """-> what makes a connection, and gives the client's end"""
    connections = connections or Connections(limits)
    config = uvicorn.Config(app, http=connections.make, log_config=None, lifespan="off")  # type: ignore[arg-type]
    config.load()
    sweep = asyncio.create_task(connections.sweep())

    def make() -> asyncio.Protocol:
        return connections.make(config=config, server_state=ServerState(), app_state={})

    with contextlib.ExitStack() as clients:

        async def connect() -> socket.socket:
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            await asyncio.get_running_loop().connect_accepted_socket(make, theirs)
            return clients.enter_context(ours)

        yield connect
    connections.drop()
    sweep.cancel()
    await asyncio.sleep(0.05)


@asynccontextmanager
async def connection(app: Application, limits: ClientLimits) -> AsyncIterator[socket.socket]:
    """The client's end."""
    async with serving(app, limits) as connect:
        yield await connect()


def answers(body: bytes) -> Application:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        length = (b"content-length", b"%d" % len(body))
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": body})

    return app


def streams(*parts: bytes) -> Application:
    """An answer whose length is not known at its head."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body"})

    return app


async def exchange(client: socket.socket, request: bytes, end: bytes | None = None) -> bytes:
    """The answer to its `end`, or to that of the connection."""
    loop, got = asyncio.get_running_loop(), b""
    await loop.sock_sendall(client, request)
    while end is None or not got.endswith(end):
        part = await answer_of(loop.sock_recv(client, 1 << 16), 30)
        if not part:
            break
        got += part
    return got


async def read(client: socket.socket, size: int, pause: float, wanted: int) -> int:
    """Bytes that come until so many are there, or the connection ends."""
    loop, got = asyncio.get_running_loop(), 0
    with contextlib.suppress(ConnectionError):
        while got < wanted and (part := await loop.sock_recv(client, size)):
            got += len(part)
            await asyncio.sleep(pause)
    return got


@pytest.mark.parametrize(
    ("app", "sent"),
    [
        (answers(b"x"), HEAD % 0),
        (answers(b"x"), HEAD % 4),  # its body does not come
        (answers(b"x"), b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n"),  # refused
        (streams(b"x", b"y"), HEAD.replace(b"1.1", b"1.0") % 0),
        (answers(b"x"), (HEAD % 4) + b"1234" + (HEAD % 0) * 3),
        (answers(b"x"), (HEAD % 4) + b"12" + b"3"),
    ],
    ids=["answered", "waits", "refused", "1.0", "several", "half"],
)
def test_nothing_of_a_lost_connection_waits_for_the_collector(
    app: Application, sent: bytes
) -> None:
    """It visits an HTTP process's objects rarely (http/process)."""
    limits = ClientLimits()
    connections = Connections(limits)
    made: list[weakref.ref[Any]] = []

    async def story() -> None:
        async with serving(app, limits, connections) as connect:
            client = await connect()
            made.extend(map(weakref.ref, connections.open))
            await asyncio.get_running_loop().sock_sendall(client, sent)
            await asyncio.sleep(0.05)
            client.close()
            await asyncio.sleep(0.05)

    gc.collect()
    gc.disable()
    try:
        asyncio.run(story())
        assert len(made) == 1 and made[0]() is None
    finally:
        gc.enable()


def test_a_client_that_reads_slowly_but_steadily_gets_its_whole_answer() -> None:
    """It takes several times as long as a client may read nothing."""
    body, limits = b"x" * (2 << 20), ClientLimits(stall=0.5, sweep=0.05)

    async def story() -> None:
        async with connection(answers(body), limits) as client:
            await asyncio.get_running_loop().sock_sendall(client, HEAD % 0)
            assert await read(client, 64 << 10, 0.06, len(body)) >= len(body)

    asyncio.run(story())


def test_a_client_that_hardly_reads_is_cut() -> None:
    body, limits = b"x" * (4 << 20), ClientLimits(stall=0.5, sweep=0.05)

    async def story() -> None:
        async with connection(answers(body), limits) as client:
            await asyncio.get_running_loop().sock_sendall(client, HEAD % 0)
            await read(client, 64, 0.1, 2000)
            assert await read(client, 1 << 20, 0, len(body)) < len(body)

    asyncio.run(story())


def test_a_head_behind_a_large_body_is_counted_from_its_own_beginning() -> None:
    """Pipelined: the body, longer than a head may be, comes with half of the next head."""
    limits, length = ClientLimits(), 3 * ClientLimits().head_bytes

    async def story() -> None:
        loop = asyncio.get_running_loop()
        async with connection(answers(b"ok"), limits) as client:
            head = HEAD % length
            client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            assert client.send(head + b" " * length + head[:40]) == len(head) + length + 40
            await asyncio.sleep(0.2)
            await loop.sock_sendall(client, head[40:] + b" " * length)
            got = b""
            while got.count(b"\r\n\r\nok") < 2:
                part = await answer_of(loop.sock_recv(client, 1 << 16))
                assert part, got
                got += part
            assert got.count(b"HTTP/1.1 200") == 2

    asyncio.run(story())


def test_a_head_behind_another_request_has_its_bound_too() -> None:
    async def story() -> None:
        async with connection(answers(b"ok"), ClientLimits()) as client:
            loop = asyncio.get_running_loop()
            long = (HEAD % 0)[:-2] + b"X: " + b"y" * (40 << 10)
            await loop.sock_sendall(client, HEAD % 0 + long)
            got = b""
            while part := await answer_of(loop.sock_recv(client, 1 << 16)):
                got += part
            assert got.count(b"HTTP/1.1 200") <= 1  # then the connection has ended

    asyncio.run(story())


def test_what_idle_connections_may_hold_fits_a_container() -> None:
    """4,000 unfinished heads of 31 KiB took 194 MiB of a container with 128 MiB of headroom."""
    limits = ClientLimits().on(Device.CPU)
    heads, bodies = limits.connections * limits.head_bytes, limits.connections * FREE_BYTES
    assert heads + bodies + limits.body_bytes <= 64 << 20


@pytest.mark.parametrize("memory", [None, 16 << 30])
def test_a_large_host_of_a_gpu_has_the_limits_as_they_are(memory: int | None) -> None:
    assert ClientLimits().on(Device.CUDA, memory) == ClientLimits()


def test_a_small_host_of_a_gpu_has_the_cpu_s_limits() -> None:
    """Clients at a GPU's limits would take more than such a container has beside the engine."""
    small, cpu = ClientLimits().on(Device.CUDA, 4 << 30), ClientLimits().on(Device.CPU)
    assert (small.body_bytes, small.parsing) == (cpu.body_bytes, cpu.parsing)
    assert small.longest_text(131_072) == 2 << 20  # a text that fits the context is taken
    assert small.memory(8192, 512) < 1 << 30


@pytest.mark.parametrize("alive", [b"", b"Connection: keep-alive\r\n"])
def test_http_1_0_gets_no_chunks_and_ends_with_its_connection(alive: bytes) -> None:
    async def story(app: Application, request: bytes, body: bytes) -> bytes:
        async with connection(app, ClientLimits()) as client:
            head, _, found = (await exchange(client, request)).partition(b"\r\n\r\n")
            assert found == body
            assert b"connection: close" in head and b"transfer-encoding" not in head
            return head

    expects = b"GET / HTTP/1.0\r\nExpect: 100-continue\r\n" + alive + b"\r\n"
    asyncio.run(story(streams(b"one", b"", b"two"), b"GET / HTTP/1.0\r\n%s\r\n" % alive, b"onetwo"))
    asyncio.run(story(streams(b"one"), expects, b"one"))
    asyncio.run(story(streams(b"one"), b"HEAD / HTTP/1.0\r\n%s\r\n" % alive, b""))
    whole = asyncio.run(story(answers(b"whole"), b"GET / HTTP/1.0\r\n%s\r\n" % alive, b"whole"))
    assert b"content-length: 5" in whole


def test_http_1_1_still_gets_chunks_and_keeps_its_connection() -> None:
    async def story() -> None:
        async with connection(streams(b"one"), ClientLimits()) as client:
            for _ in range(2):
                answer = await exchange(client, HEAD % 0, end=b"0\r\n\r\n")
                assert b"transfer-encoding: chunked" in answer and b"3\r\none\r\n" in answer

    asyncio.run(story())


def test_an_idle_connection_ends_at_its_time_and_not_before() -> None:
    async def story() -> None:
        loop = asyncio.get_running_loop()
        async with connection(answers(b"ok"), ClientLimits(idle=1.0, sweep=0.05)) as client:
            for _ in range(3):
                assert (await exchange(client, HEAD % 0, end=b"ok")).startswith(b"HTTP/1.1 200")
                await asyncio.sleep(0.4)
            began = loop.time()
            assert await exchange(client, b"") == b""
            assert loop.time() - began > 0.3

    asyncio.run(story())


def test_where_many_are_open_an_answer_says_that_its_connection_ends() -> None:
    """Before idle ones have to be closed without a word, which fails what their clients send."""

    async def story() -> None:
        async with serving(answers(b"ok"), ClientLimits(connections=8)) as connect:
            clients = [await connect() for _ in range(6)]
            last = [await exchange(client, HEAD % 0, end=b"ok") for client in clients]
            assert not any(b"connection: close" in answer for answer in last)
            clients.append(await connect())  # seven of eight
            answer = await exchange(clients[0], HEAD % 0)  # to the connection's end
            assert b"connection: close" in answer and answer.endswith(b"ok")
            assert b"connection: close" not in await exchange(clients[1], HEAD % 0, end=b"ok")

    asyncio.run(story())
