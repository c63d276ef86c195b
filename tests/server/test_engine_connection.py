"""The connection between engine and HTTP process: neither side blocks the other."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from kvline_server.engine.messages import Channel, Delta, Deltas, Submit, encode
from kvline_server.engine.outbox import Outbox
from kvline_server.engine.request import SamplingParams
from kvline_server.http.engine_client import EngineClient
from kvline_server.http.errors import ApiError, EngineFailed, NotRead

PARAMS = SamplingParams(max_tokens=4)


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with theirs:
        yield ours, theirs
    time.sleep(0.1)
    ours.close()


def frame(count: int) -> Deltas:
    return Deltas([Delta(number, 1) for number in range(count)])


def test_sending_never_blocks_and_keeps_the_order(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    """Ten times the socket buffer while nobody reads; then all of it arrives in order."""
    ours, theirs = sockets
    outbox, sent = Outbox(ours), [frame(number) for number in range(1, 1500, 3)]
    done = threading.Event()

    def send() -> None:
        for message in sent:
            outbox.send(message)
        done.set()

    threading.Thread(target=send, daemon=True).start()
    assert done.wait(30)
    received = Channel(theirs).receive()
    assert [next(received) for _ in sent] == sent
    outbox.send(frame(1))
    assert next(received) == frame(1)
    received.close()  # type: ignore[attr-defined]


def test_a_reader_that_falls_too_far_behind_is_disconnected(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    outbox = Outbox(sockets[0], limit=1 << 20)
    with pytest.raises(OSError, match="does not read"):
        for _ in range(10_000):
            outbox.send(frame(1000))
    with pytest.raises(OSError):
        outbox.send(frame(1))


@asynccontextmanager
async def connected(unread: int = 100) -> AsyncIterator[tuple[EngineClient, asyncio.StreamWriter]]:
    ours, theirs = socket.socketpair()
    client = EngineClient(unread)
    await client.connect(ours)
    _, writer = await asyncio.open_connection(sock=theirs)
    yield client, writer
    writer.close()
    await asyncio.wait_for(client.lost.wait(), 10)
    await asyncio.sleep(0)  # the transports close


async def ask(client: EngineClient) -> list[Delta]:
    return [delta async for deltas in client.generate([1], PARAMS) for delta in deltas]


@pytest.mark.parametrize(
    "garbage",
    [b"\x05\0\0\0hello", b"\xff\xff\xff\xff", encode(Submit(1, [1], PARAMS))[:-1] + b"\xc1"],
    ids=["not-msgpack", "too-long", "wrong-field"],
)
def test_an_invalid_message_fails_every_request_with_a_reason(garbage: bytes) -> None:
    """None hangs: waiting and later requests fail, and the process has the reason."""

    async def story() -> None:
        async with connected() as (client, engine):
            waiting = [asyncio.create_task(ask(client)) for _ in range(3)]
            await asyncio.sleep(0)
            engine.write(garbage)
            for task in waiting:
                with pytest.raises(EngineFailed):
                    await asyncio.wait_for(task, 10)
            await asyncio.wait_for(client.lost.wait(), 10)
            assert "invalid message" in client.why_lost
            assert not client.connected
            with pytest.raises(EngineFailed):
                await ask(client)

    asyncio.run(story())


def test_deltas_that_nobody_takes_are_bounded() -> None:
    """F47: the buffered deltas are still delivered, then an error reports that the rest was not."""

    async def story() -> None:
        async with connected(unread=100) as (client, engine):
            sequence = client.generate([1], PARAMS)
            first = asyncio.ensure_future(anext(sequence))
            await asyncio.sleep(0)
            engine.write(encode(Deltas([Delta(1, 7)])))
            got = await asyncio.wait_for(first, 10)
            for _ in range(50):
                engine.write(encode(Deltas([Delta(1, 7)] * 10)))
            await engine.drain()
            await asyncio.sleep(0.2)
            with pytest.raises(NotRead):
                async for deltas in sequence:
                    got += deltas
            assert 100 <= len(got) <= 102

    asyncio.run(story())


def test_a_burst_for_a_waiting_request_is_no_overflow() -> None:
    """The HTTP process itself may have been slow: thousands of deltas at once are accepted."""

    async def story() -> None:
        async with connected(unread=100) as (client, engine):
            task = asyncio.create_task(ask(client))
            await asyncio.sleep(0)
            engine.write(encode(Deltas([Delta(1, 7)] * 5000 + [Delta(1, 7, "length")])))
            assert len(await asyncio.wait_for(task, 10)) == 5001

    asyncio.run(story())


def test_the_end_of_a_drain_reaches_every_sequence() -> None:
    async def story() -> None:
        async with connected() as (client, _):
            waiting = asyncio.create_task(ask(client))
            await asyncio.sleep(0)
            client.end(ApiError("over"))
            for task in (waiting, asyncio.create_task(ask(client))):
                with pytest.raises(ApiError, match="over"):
                    await asyncio.wait_for(task, 10)

    asyncio.run(story())
