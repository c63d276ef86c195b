"""Clients that hold on to what they are given: slow, endless, idle, many, gone. Each meets a bound,
and a good client beside them is served. Times are shortened; ids are the reliability catalogue's.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from servers import Server, serving
from waiting import answered, limit

from kvline_contract.launch import CapacityOptions, EngineOptions
from kvline_server.options.clients import ClientLimits

pytestmark = pytest.mark.process
LEAVES = 0.3  # seconds after which a client has left

COMPLETION = {"model": "tiny", "prompt": "hello", "max_tokens": 3}
JSON = b"Host: x\r\nContent-Type: application/json\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n" + JSON
CLIENTS = {
    "connections": 60,
    "idle": 3.0,
    "head": 1.0,
    "body": 2.0,
    "body_pause": 1.0,
    "body_bytes": 4 << 20,
    "stall": 2.0,
    "unread_tokens": 200,
    "linger": 1.0,
    "sweep": 0.1,
}


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(
        tiny_model,
        tmp_path_factory.mktemp("edges"),
        engine=EngineOptions(max_model_len=512, max_running_requests=4),
        capacity=CapacityOptions(kv_tokens=4096, headroom_mib=8),
        clients=CLIENTS,
    )
    with serving(made):
        yield made


@contextlib.contextmanager
def connected(server: Server, *parts: bytes) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), limit(30)) as raw:
        for part in parts:
            raw.sendall(part)
        yield raw


def everything(raw: socket.socket) -> bytes:
    """Until the server closes; a reset is an end as well."""
    out = b""
    with answered(), contextlib.suppress(ConnectionError):
        while part := raw.recv(65536):
            out += part
    return out


def until(raw: socket.socket, mark: bytes) -> bytes:
    """One answer, which ends soon after the mark."""
    out = b""
    while mark not in out or not out.endswith(b"}"):
        with answered():
            part = raw.recv(1 << 16)
        assert part, out
        out += part
    return out


def refused(answer: bytes, status: int) -> None:
    """One whole answer in OpenAI's form that says that the connection ends."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert b"connection: close" in head.lower()
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


def good(server: Server) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json=COMPLETION, timeout=limit(30))
    assert answer.status_code == 200, answer.text


def files(server: Server) -> int:
    return len(os.listdir(f"/proc/{server.children()['http']}/fd"))


def resident(server: Server) -> int:
    """MiB of the HTTP process."""
    pages = Path(f"/proc/{server.children()['http']}/statm").read_text().split()[1]
    return int(pages) * 4096 >> 20


def test_the_defaults_are_those_that_are_promised() -> None:
    limits = ClientLimits()
    assert (limits.head, limits.body_pause, limits.stall) == (10, 10, 30)
    assert limits.idle > 600, "as long as the balancers of clouds keep an idle connection"
    assert limits.unread_tokens <= 1000


# Heads ----------------------------------------------------------------------------------------


def test_a_head_that_trickles_is_ended(server: Server) -> None:
    """H09: at a limit of 1 s (not 10) each byte comes soon after the last, and the whole never."""
    with connected(server) as raw:
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            for byte in b"GET /v1/models HTTP/1.1\r\nX: " + b"y" * 1000:
                raw.sendall(bytes([byte]))
                time.sleep(0.05)
                if time.monotonic() - began > 3:
                    break
        refused(everything(raw), 408)
    good(server)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 200_000 + b"\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 2000 + b"\r\n",
        b"GET /" + b"y" * 65536 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=["one-header", "many-headers", "request-line"],
)
def test_a_large_head_is_431(server: Server, head: bytes) -> None:
    """H10."""
    with connected(server, head) as raw:
        refused(everything(raw), 431)


@pytest.mark.parametrize("part", [b"A: b\r\n" * 1000, b"y" * 10_000], ids=["headers", "one"])
def test_a_head_without_end_takes_no_memory(server: Server, part: bytes) -> None:
    """H10: what comes after the bound is not kept, and soon not even read."""
    before = resident(server)
    with connected(server, b"GET /v1/models HTTP/1.1\r\nX: ") as raw:
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 100 << 20:
                sent += raw.send(part)
        assert sent < 20 << 20
    assert resident(server) - before < 8
    good(server)


@pytest.mark.parametrize(
    "head",
    [
        POST + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
        POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        POST + b"Content-Length: -1\r\n\r\n{}",
        b"nonsense\r\n\r\n",
    ],
    ids=["both", "two-lengths", "negative", "nonsense"],
)
def test_what_could_be_smuggled_is_400_and_closed(server: Server, head: bytes) -> None:
    """H43."""
    with connected(server, head) as raw:
        refused(everything(raw), 400)


# Bodies ---------------------------------------------------------------------------------------


def test_a_body_that_stops_is_408(server: Server) -> None:
    """H08: at a limit of 1 s (not 10) without a byte."""
    with connected(server, POST + b'Content-Length: 1000000\r\n\r\n{"model":') as raw:
        refused(everything(raw), 408)  # its socket waits for 30 s


def test_a_body_that_trickles_is_408(server: Server) -> None:
    """H08: at a limit of 2 s (not 30), without a pause of 1 s (not 10) and without an end."""
    with connected(server, POST + b"Content-Length: 1000000\r\n\r\n") as raw:
        with contextlib.suppress(ConnectionError):
            for _ in range(40):
                raw.sendall(b" ")
                time.sleep(0.1)
        refused(everything(raw), 408)


def test_a_body_that_says_it_is_too_long_is_not_read(server: Server) -> None:
    """H07: 50 MB; the answer comes at once, and is not lost in a reset while the client sends."""
    with connected(server, POST + b"Content-Length: 50000000\r\n\r\n") as raw:
        refused(everything(raw), 413)


def test_who_sends_a_whole_body_before_reading_sees_why_it_is_refused(server: Server) -> None:
    """H07: as Python's http.client does; several times, since a reset comes by chance."""
    for _ in range(5):
        with connected(server, POST + b"Content-Length: 7000000\r\n\r\n") as raw:
            raw.sendall(b"y" * 7_000_000)
            refused(everything(raw), 413)


def test_chunks_without_end_are_413_and_reading_stops(server: Server) -> None:
    """H07."""
    before = resident(server)
    chunk = b"10000\r\n" + b"y" * 65536 + b"\r\n"
    with connected(server, POST + b"Transfer-Encoding: chunked\r\n\r\n") as raw:
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 200 << 20:
                sent += raw.send(chunk)
        assert sent < 20 << 20
    assert resident(server) - before < 16
    good(server)


def test_a_compressed_body_is_415(server: Server) -> None:
    """H11."""
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = httpx.post(
        f"{server.url}/v1/completions", content=b"\x1f\x8b", headers=headers, timeout=limit(5)
    )
    assert answer.status_code == 415


def test_a_refused_request_does_not_cost_the_connection(server: Server) -> None:
    """The rest of a small body is read away; the next request on the connection is answered."""
    with connected(
        server, b"POST /nowhere HTTP/1.1\r\n" + JSON + b"Content-Length: 4\r\n\r\n"
    ) as raw:
        until(raw, b'"error"')
        raw.sendall(b"{}{}" + b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        assert until(raw, b'"data"').startswith(b"HTTP/1.1 200")


def test_half_sent_bodies_have_a_bound_together_and_are_given_back(server: Server) -> None:
    """Forty times 1 MiB of 2: most are refused, a small request beside them is not."""
    before = resident(server)
    refusals = server.ends()["refused"]
    with contextlib.ExitStack() as stack:
        half = POST + b"Content-Length: 2000000\r\n\r\n" + b"y" * (1 << 20)
        opened = [stack.enter_context(connected(server)) for _ in range(40)]
        for raw in opened:
            raw.settimeout(limit(0.5))
            with contextlib.suppress(OSError):
                raw.sendall(half)
        good(server)
        assert resident(server) - before < 24
    server.ended(lambda ends: ends["refused"] >= refusals + 30)
    assert resident(server) - before < 12
    good(server)


# Connections ----------------------------------------------------------------------------------


def test_idle_connections_are_capped_and_closed(server: Server) -> None:
    """H44: 160 connections where 60 are allowed (not 10,000), idle for 3 s at most (not 620); a
    good client is served among them."""
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connected(server)) for _ in range(160)]
        good(server)
        assert files(server) < 100
        assert everything(idle[0]) == b""  # the one that had waited longest
        assert everything(idle[-1]) == b""  # by its time


def test_a_stream_for_http_1_0_is_its_text_alone(server: Server) -> None:
    """As nginx asks by default. Its clients read the sizes of chunks as text."""
    body = json.dumps({**COMPLETION, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\n"
    with connected(server, head, b"Content-Length: %d\r\n\r\n" % len(body), body) as raw:
        answer, _, text = everything(raw).partition(b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding" not in answer.lower()
    lines = [line for line in text.split(b"\n") if line]
    assert all(line.startswith(b"data: ") for line in lines), text
    assert lines[-1] == b"data: [DONE]"


def test_pipelined_requests_are_capped(server: Server) -> None:
    """H44: a thousand at once on one connection end it; a few are answered in order."""
    one = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    with connected(server, one * 1000) as raw:
        assert everything(raw).count(b"HTTP/1.1 200") < 1000
    with connected(server, one * 4) as raw:
        answers = b""
        while answers.count(b"HTTP/1.1 200") < 4:
            with answered():
                answers += raw.recv(65536)
    good(server)


def test_a_thousand_clients_that_come_and_go_leave_nothing(server: Server) -> None:
    """H47: with a reset, at every stage of a request."""
    server.rests()
    before = files(server)
    body = json.dumps({**COMPLETION, "max_tokens": 200, "stream": True}).encode()
    whole = POST + b"Content-Length: %d\r\n\r\n" % len(body) + body
    for number in range(1000):
        with connected(server, whole[: number % (len(whole) + 1)]) as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    server.rests()
    server.counts(lambda: files(server), lambda count: count <= before + 2)
    good(server)
    assert "Traceback" not in server.output()


def test_who_leaves_inside_a_body_is_aborted_and_no_error(server: Server) -> None:
    before = server.ends()
    for _ in range(5):
        with connected(server, POST + b"Content-Length: 5000\r\n\r\n{"):
            time.sleep(0.05)
    server.ended(lambda ends: ends["aborted"] >= before["aborted"] + 5)
    assert server.ends()["failed"] == before["failed"]
    assert "Traceback" not in server.output()


def test_who_leaves_before_the_answer_leaves_no_traceback(server: Server) -> None:
    """F45."""
    before = server.ends()
    with pytest.raises(httpx.ReadTimeout):
        body = {**COMPLETION, "max_tokens": 480, "ignore_eos": True, "n": 8}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=LEAVES)
    server.ended(lambda ends: ends["aborted"] > before["aborted"])
    server.rests()
    assert "Traceback" not in server.output()


def test_clients_that_read_nothing_lose_their_places(server: Server) -> None:
    """F47: all places are taken by streams that nobody reads; after 200 tokens or 2 s (not 30) they
    are dropped, their pages come back, and a client that was refused meanwhile is served."""
    server.rests()
    before = server.ends()
    stream = {"max_tokens": 490, "ignore_eos": True, "stream": True, "logprobs": 20}
    body = json.dumps({**COMPLETION, **stream}).encode()
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            raw = stack.enter_context(socket.socket())
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.connect(("127.0.0.1", server.port))
            raw.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        server.ended(lambda ends: ends["aborted"] >= before["aborted"] + 20, 60)
        server.rests()
        good(server)
    assert server.ends()["failed"] == before["failed"]
    assert "Traceback" not in server.output()
