"""What is no message ends the process that was sent it, with a reason."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from servers import launch_config
from waiting import eventually, limit, within

from kvline_contract.exits import ExitCode
from kvline_server.errors import InvalidFrame
from kvline_server.http.chat_tokens import RENDERING, RENDERING_PER_BYTE
from kvline_server.ipc import frames, messages
from kvline_server.ipc.frames import MAX_BODY
from kvline_server.ipc.messages import (
    Answer,
    Beat,
    Channel,
    Message,
    Progress,
    Run,
    encode,
)
from kvline_server.options.clients import ClientLimits
from kvline_server.options.options import Options
from kvline_server.parallel import join
from kvline_server.parallel.link import Link
from kvline_server.parent.children import Child
from kvline_server.parent.supervisor import Supervisor

TOO_LONG = (MAX_BODY + 1).to_bytes(4, "little")  # and nothing after it
INVALID = {
    "too long": (TOO_LONG, f"a frame of {MAX_BODY + 1} bytes, where one has {MAX_BODY} at most"),
    "no msgpack": (b"\x02\x00\x00\x00\xc1\xc1", "a frame of 2 bytes is no message"),
    "of no kind": (b"\x03\x00\x00\x00\x91\xa1x", "a frame of 3 bytes is no message"),
    "cut off": (b"\x02\x00\x00\x00\x92\xa5", "a frame of 2 bytes is no message"),
    "nested": (b"\x00\x00\x01\x00" + b"\x91" * 0x10000, "a frame of 65536 bytes is no message"),
}
# What handling these raises.
FAULTS = {
    "a fault of ours": (encode(Run(4)), "KeyError: 4"),
    "a file's": (encode(Run(5)), "OSError: 5"),
}
FAILS = {4: KeyError(4), 5: OSError(5)}
# A process with a thread that reads from the parent, and one that reads from another; the main
# thread sleeps.
LISTENER = """
import socket, sys, time
from kvline_contract.exits import ExitCode
from kvline_server.engine_process.listen import listen
from kvline_server.ipc.messages import Channel, Run
parent, other = (Channel(socket.socket(fileno=int(fd))) for fd in sys.argv[1:])
def handle(message):
    if isinstance(message, Run):
        raise {4: KeyError(4), 5: OSError(5)}[message.buffer]
listen(parent, "the parent", handle, parent, ExitCode.RANK_LOST)
listen(other, "an HTTP process", handle, parent)
time.sleep(600)
"""


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def by_channel(reads: socket.socket) -> list[Message]:
    received = Channel(reads).receive()
    return [next(received), next(received)]


def by_link(reads: socket.socket) -> list[Message]:
    link = Link(reads, 3)
    return [cast(Message, link.receive(limit(5))) for _ in range(2)]


def by_stream(reads: socket.socket) -> list[Message]:
    async def read() -> list[Message]:
        reader, writer = await asyncio.open_connection(sock=reads.dup())
        try:
            return [await messages.read(reader) for _ in range(2)]
        finally:
            writer.close()

    return asyncio.run(read())


@pytest.mark.parametrize("what", INVALID)
@pytest.mark.parametrize("reader", [by_channel, by_link, by_stream])
def test_what_is_no_message_is_refused_before_more_is_waited_for(
    pair: tuple[socket.socket, socket.socket],
    what: str,
    reader: Callable[[socket.socket], list[Message]],
) -> None:
    sent, text = INVALID[what]
    pair[0].sendall(encode(Answer([7])) + encode(Answer([8])))
    assert reader(pair[1]) == [Answer([7]), Answer([8])]
    pair[0].sendall(encode(Answer([7])) + sent)
    with within(5), pytest.raises(InvalidFrame, match=text) as error:
        reader(pair[1])
    assert error.value.code is ExitCode.ENGINE_DIED
    assert ("rank 3 sent" in str(error.value)) == (reader is by_link)


def test_an_end_in_the_middle_of_a_frame_is_an_end() -> None:
    for cut in (2, 6):
        ours, theirs = socket.socketpair()
        with theirs:
            with ours:
                ours.sendall(encode(Run(1)) + encode(Run(2))[:cut])
            assert list(Channel(theirs).receive()) == [Run(1)]


def test_a_rank_that_sends_what_nobody_asked_for_is_named(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    pair[0].sendall(encode(Run(1)))
    with pytest.raises(InvalidFrame, match="rank 2 sent Run, which nobody asked for"):
        join._loaded(Link(pair[1], 2))


@pytest.mark.parametrize("fails", [*INVALID, *FAULTS])
@pytest.mark.parametrize(("source", "name"), [(0, "the parent"), (1, "an HTTP process")])
def test_a_process_that_cannot_hear_ends_and_says_why(fails: str, source: int, name: str) -> None:
    """Its thread ended before, and it seemed idle: nothing that it was sent was ever done."""
    pairs = [socket.socketpair() for _ in range(2)]
    fds = [theirs.fileno() for _, theirs in pairs]
    command = [sys.executable, "-c", LISTENER, *map(str, fds)]
    with subprocess.Popen(command, pass_fds=fds) as process:
        for _, theirs in pairs:
            theirs.close()
        sent, text = INVALID.get(fails) or FAULTS[fails]
        pairs[source][0].sendall(encode(Answer()) + sent)
        (last,) = Channel(pairs[0][0]).receive()
        assert process.wait(limit(30)) == int(ExitCode.ENGINE_DIED)
    for ours, _ in pairs:
        ours.close()
    assert isinstance(last, Progress) and last.failure is not None
    assert last.failure.code == int(ExitCode.ENGINE_DIED)
    assert name in last.failure.message and text in last.failure.message


def test_a_process_ends_with_its_parent() -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    fds = [theirs.fileno() for _, theirs in pairs]
    command = [sys.executable, "-c", LISTENER, *map(str, fds)]
    with subprocess.Popen(command, pass_fds=fds) as process:
        for ours, theirs in pairs:
            theirs.close()
            ours.close()
        assert process.wait(limit(30)) == int(ExitCode.RANK_LOST)


@pytest.fixture
def parent(tmp_path: Path) -> Supervisor:
    config = tmp_path / "launch.json"
    config.write_text(launch_config(tmp_path).dumps())
    return Supervisor(Options(config=config, state_dir=tmp_path), launch_config(tmp_path))


@pytest.mark.parametrize("fails", [*INVALID, *FAULTS])
def test_the_parent_ends_where_it_cannot_hear_a_child(
    parent: Supervisor, pair: tuple[socket.socket, socket.socket], fails: str
) -> None:
    """It took the child for hung, a minute later and with another reason."""

    def handle(message: Message) -> None:
        if isinstance(message, Run):
            raise FAILS[message.buffer]
        heard.append(message)

    heard: list[Message] = []
    with subprocess.Popen(["sleep", "600"]) as process:
        child = Child(process, Channel(pair[1]), [])
        child.follow(handle)
        parent.http = [child]
        beat = Beat(busy=False, steps=1)
        pair[0].sendall(encode(beat))
        eventually(lambda: heard == [beat], on="server")
        assert parent._failure() is None
        sent, text = INVALID.get(fails) or FAULTS[fails]
        pair[0].sendall(sent)
        eventually(lambda: child.heard.is_set(), on="server")
        ended = parent._failure()
        process.kill()
    assert ended is not None and ended.code == int(ExitCode.ENGINE_DIED)
    assert ended.message.startswith("an HTTP process sent") and text in ended.message


def test_a_frame_of_a_renderer_has_a_bound() -> None:
    """The same: no rendering is longer than half of its memory, as it is copied to be sent."""
    memory = RENDERING + RENDERING_PER_BYTE * ClientLimits().most_text_bytes
    assert memory // 2 < MAX_BODY
    reads, writes = os.pipe()
    with open(reads, "rb") as source, open(writes, "wb") as out:
        frames.write(out, b"a job")
        assert frames.read(source) == b"a job"
        os.write(writes, TOO_LONG)
        with within(5), pytest.raises(InvalidFrame, match=f"a frame of {MAX_BODY + 1} bytes"):
            frames.read(source)
        os.write(writes, frames.framed(b"another")[:-1])
        out.close()
        assert frames.read(source) is None


@given(st.lists(st.binary(max_size=40), min_size=1), st.data())
def test_frames_are_taken_whole_from_pieces_of_any_size(
    bodies: list[bytes], data: st.DataObject
) -> None:
    sent = b"".join(map(frames.framed, bodies))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=20)))
    received, taken = frames.Received(), list[bytes]()
    for start, end in itertools.pairwise([0, *cuts, len(sent)]):
        received.add(sent[start:end])
        while (body := received.take()) is not None:
            taken.append(body)
    assert taken == bodies
    received.add(TOO_LONG[:-1])
    assert received.take() is None
    received.add(TOO_LONG[-1:])
    with pytest.raises(InvalidFrame, match=f"a frame of {MAX_BODY + 1} bytes"):
        received.take()
