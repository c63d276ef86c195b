"""F38: reports are untrusted; any answer is read within five seconds and 64 KiB."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from waiting import eventually, within

from kvline_contract.memory import MemoryV1
from kvline_contract.report import (
    Result,
    SizingReport,
    Source,
    State,
)
from kvline_operator.observe.ask import Request, Silent
from kvline_operator.observe.reports import REPORT_PATH, Reading, Reports

GOOD = SizingReport("uid", "pod", "abcde", 3, State.PROBING, "t0", "t1")
VALIDATED = replace(
    GOOD,
    state=State.VALIDATED,
    result=Result(
        4096, 10, Source.MEASURED, "f", 5, 6, 0, "t", (MemoryV1(6, 1, 1, 1, 1, 1, 1).upgraded(),)
    ),
)


@contextmanager
def answering(
    answer: Callable[[socket.socket], None], seen: Callable[[bytes], None] = lambda head: None
) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    seen(connection.recv(4096))
                    try:
                        answer(connection)
                    except OSError:
                        continue

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]


def fetch(port: int) -> Reading:
    reports = Reports(port, 300)

    def read() -> Reading | None:
        reading = reports.read("uid", "127.0.0.1", ready=False)
        return None if "no answer" in reading.error else reading

    found: Reading = eventually(read, 30, on="server")
    return found


def body(text: str | bytes, status: str = "200 OK") -> Callable[[socket.socket], None]:
    raw = text.encode() if isinstance(text, str) else text
    return lambda s: s.sendall(f"HTTP/1.0 {status}\r\n\r\n".encode() + raw)


def endless(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
    while True:
        connection.sendall(b" " * 65536)


def drip(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
    for _ in range(600):
        connection.sendall(b" ")
        time.sleep(0.1)


def test_a_report_is_read() -> None:
    with answering(body(GOOD.dumps())) as port:
        assert fetch(port).report == GOOD


@pytest.mark.parametrize("version", [1, 2])
def test_a_report_is_asked_for_in_this_version_and_read_in_both(version: int) -> None:
    asked: list[bytes] = []

    def answer(connection: socket.socket) -> None:
        body(VALIDATED.dumps(version))(connection)

    with answering(answer, asked.append) as port:
        assert fetch(port).report == VALIDATED
    assert [head.split(b"\r\n")[0] for head in asked] == [b"GET /sizing?version=3 HTTP/1.0"]


BAD = {
    "10 MB": body(b" " * 10_000_000),
    "endless": endless,
    "not JSON": body("<html>"),
    "NaN": body(GOOD.dumps().replace('"sequence":3', '"sequence":NaN')),
    "negative": body(GOOD.dumps().replace('"sequence":3', '"sequence":-3')),
    "float": body(GOOD.dumps().replace('"sequence":3', '"sequence":3.5')),
    "other version": body(GOOD.dumps().replace('"version":3', '"version":9')),
    "other pod": body(GOOD.dumps().replace('"podUID":"uid"', '"podUID":"other"')),
    "not found": body(GOOD.dumps(), "404 Not Found"),
    "no HTTP": lambda s: s.sendall(b"hello"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.fault(
    "F38",
    shows="each bad answer from a real socket is ReportInvalid with its reason",
)
def test_a_bad_answer_is_invalid_and_says_why(name: str) -> None:
    with answering(BAD[name]) as port:
        with within(5.5):
            reading = fetch(port)
        assert reading.report is None
        assert reading.invalid
        assert 0 < len(reading.error) < 300
        assert name != "other version" or "version 9, 1, 2 and 3 can be read" in reading.error


@pytest.mark.fault("F38", shows="an answer that drips ends within its time")
def test_a_slow_answer_ends_in_time() -> None:
    with answering(drip) as port, within(1), pytest.raises(Silent):
        Request("127.0.0.1", port, REPORT_PATH).begin(seconds=0.5).result()


@pytest.mark.fault("F38", shows="nobody there is Unreachable")
def test_nobody_there_is_unreachable() -> None:
    reading = fetch(1)
    assert not reading.invalid
    assert "127.0.0.1:1" in reading.error


def test_a_ready_pod_is_asked_once_until_resync_and_never_blanked() -> None:
    now = [0.0]
    text = [VALIDATED.dumps()]
    count = []

    def answer(connection: socket.socket) -> None:
        count.append(1)
        body(text[0])(connection)

    with answering(answer) as port:
        reports = Reports(port, 300, clock=lambda: now[0])
        assert reports.read("uid", "127.0.0.1", ready=True).report == VALIDATED
        assert reports.read("uid", "127.0.0.1", ready=True).report == VALIDATED
        assert len(count) == 1
        now[0] = 301
        text[0] = "broken"
        reading = reports.read("uid", "127.0.0.1", ready=True)
        assert reading.report == VALIDATED
        assert reading.error
        assert Reports(port, 300).read("uid", "127.0.0.1", ready=True).report is None
