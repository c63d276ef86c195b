"""The connection between engine and HTTP process: neither side blocks the other."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from waiting import answer_of, limit

from kvline_server.engine.engine import Output
from kvline_server.engine.request import Scores, Sequence
from kvline_server.engine_process.loop import SCORES_BYTES, EngineProcess
from kvline_server.engine_process.outbox import PATIENCE, Outbox
from kvline_server.http.engine_client import EngineClient
from kvline_server.http.errors import ApiError, EngineFailed, GrammarFailed, NotRead
from kvline_server.ipc.messages import Channel, Delta, Deltas, Message, Submit, encode
from kvline_server.ipc.sampling_params import SamplingParams
from kvline_server.options.arguments import EngineArguments
from kvline_server.options.options import Options

PARAMS = SamplingParams(max_tokens=4)


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with theirs:
        yield ours, theirs
    time.sleep(0.1)
    ours.close()


def frame(count: int) -> Deltas:
    return Deltas([Delta(number, [1]) for number in range(count)])


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
    assert done.wait(limit(30))
    received = Channel(theirs).receive()
    assert [next(received) for _ in sent] == sent
    outbox.send(frame(1))
    assert next(received) == frame(1)
    received.close()  # type: ignore[attr-defined]


def test_a_reader_that_reads_nothing_is_disconnected(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    now = 0.0
    outbox = Outbox(sockets[0], clock=lambda: now)
    for _ in range(1000):
        outbox.send(frame(1000))
    now += PATIENCE / 2
    outbox.send(frame(1))
    now += PATIENCE
    for _ in range(2):
        with pytest.raises(OSError, match="does not read"):
            outbox.send(frame(1))


def test_a_slow_reader_keeps_its_connection(sockets: tuple[socket.socket, socket.socket]) -> None:
    """It is always behind, for longer than it may read nothing, but it reads."""
    now, ours, theirs = 0.0, *sockets
    outbox, received = Outbox(ours, clock=lambda: now), Channel(theirs).receive()
    for _ in range(10):
        for _ in range(20):
            outbox.send(frame(3000))
        now += PATIENCE / 4
        while outbox._progress_at < now:
            assert next(received) == frame(3000)
    received.close()  # type: ignore[attr-defined]


class Recorded(Channel):
    """Keeps what is sent, too."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self.sizes: list[int] = []

    def send(self, message: Message) -> None:
        self.sizes.append(len(encode(message)))


def large(count: int, top: int = 20) -> Scores:
    column = np.arange(count, dtype=np.int32)
    table = np.arange(count * top, dtype=np.int32).reshape(count, top)
    return Scores(column, column.astype(np.float32), column, table, table.astype(np.float32))


def outputs(id: int, scores: Scores) -> list[Output]:
    sequence = Sequence(id, [1, 2], 1, SamplingParams(1, prompt_logprobs=20))
    return [Output(sequence, [5], None, "length", scores)]


@pytest.fixture
def publisher() -> Iterator[tuple[EngineProcess, socket.socket]]:
    here, line = socket.socketpair()
    parent, control = socket.socketpair()
    options = Options(Path("launch.json"), Path("state"))
    arguments = EngineArguments(options=options, control_fd=-1, http_fds=[line.detach()], root=0)
    process = EngineProcess(arguments, Channel(control))
    yield process, here
    here.close()
    parent.close()
    control.close()
    process.http[0].connection.close()


@pytest.mark.parametrize("count", [0, 1, 190_000, 450_000])
def test_no_frame_of_prompt_logprobs_is_large(
    publisher: tuple[EngineProcess, socket.socket], count: int
) -> None:
    """172 bytes a token: 390,000 were more than one frame may be, 195,000 than the backlog."""
    process, here = publisher
    recorded = Recorded(here)
    process.clients[1] = recorded
    process._publish(outputs(1, large(count)))
    assert max(recorded.sizes) <= SCORES_BYTES + 64
    assert sum(recorded.sizes) >= 172 * count


def test_large_prompt_logprobs_back_to_back_all_arrive(
    publisher: tuple[EngineProcess, socket.socket],
) -> None:
    process, here = publisher
    count, ids = 131_072, [1, 2, 3]

    async def story() -> None:
        client = EngineClient(100)
        await client.connect(here, 16)
        prompts = [[id] for id in ids]
        tasks = [asyncio.create_task(ask(client, prompt)) for prompt in prompts]
        await asyncio.sleep(0)
        for id in ids:
            process.clients[id] = process.http[0]
            process._publish(outputs(id, large(count)))
        for (delta,) in await answer_of(asyncio.gather(*tasks), 60):
            assert sum(part.count for part in delta.prompt_scores) == count
            tokens = b"".join(part.tokens for part in delta.prompt_scores)
            assert tokens == np.arange(count, dtype=np.int32).tobytes()
        assert client.connected

    asyncio.run(story())


@asynccontextmanager
async def connected(unread: int = 100) -> AsyncIterator[tuple[EngineClient, asyncio.StreamWriter]]:
    ours, theirs = socket.socketpair()
    client = EngineClient(unread)
    await client.connect(ours, 16)
    _, writer = await asyncio.open_connection(sock=theirs)
    yield client, writer
    writer.close()
    await answer_of(client.lost.wait())
    await asyncio.sleep(0)  # the transports close


async def ask(client: EngineClient, prompt: list[int] | None = None) -> list[Delta]:
    answer = client.generate(prompt or [1], PARAMS)
    return [delta async for deltas in answer for delta in deltas]


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
                    await answer_of(task)
            await answer_of(client.lost.wait())
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
            engine.write(encode(Deltas([Delta(1, [7])])))
            got = await answer_of(first)
            for _ in range(50):
                engine.write(encode(Deltas([Delta(1, [7])] * 10)))
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
            engine.write(encode(Deltas([Delta(1, [7])] * 5000 + [Delta(1, [7], "length")])))
            assert len(await answer_of(task)) == 5001

    asyncio.run(story())


def test_a_grammar_that_could_not_be_followed_is_a_503_that_says_why() -> None:
    """And one whose numbers are not finite another error."""

    async def story() -> None:
        async with connected() as (client, engine):
            failing, broken = (asyncio.create_task(ask(client)) for _ in range(2))
            await asyncio.sleep(0)
            why = "its next mask takes too long"
            deltas = [Delta(1, [7]), Delta(1, [], "error", reason=why), Delta(2, [], "error")]
            engine.write(encode(Deltas(deltas)))
            with pytest.raises(GrammarFailed, match=why) as failed:
                await answer_of(failing)
            assert (failed.value.status, failed.value.code) == (503, "grammar_failed")
            with pytest.raises(EngineFailed) as other:
                await answer_of(broken)
            assert other.value.code == "not_finite"

    asyncio.run(story())


def test_the_end_of_a_drain_reaches_every_sequence() -> None:
    async def story() -> None:
        async with connected() as (client, _):
            waiting = asyncio.create_task(ask(client))
            await asyncio.sleep(0)
            client.end(ApiError("over"))
            for task in (waiting, asyncio.create_task(ask(client))):
                with pytest.raises(ApiError, match="over"):
                    await answer_of(task)

    asyncio.run(story())
