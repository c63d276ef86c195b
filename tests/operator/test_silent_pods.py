"""F38: ports that take connections and never answer slow nobody but their own service."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from waiting import eventually, within

from kvline_contract.report import SizingReport, State
from kvline_operator.observe.ask import Asker, Request, Silent
from kvline_operator.observe.reports import REPORT_PATH, SLOW_SECONDS, Reports

SILENT = [f"127.0.1.{number}" for number in range(1, 101)]
WELL = "127.0.2.1"
REPORT = SizingReport("well", "pod", "abcde", 3, State.PROBING, "t0", "t1")


class Ports:
    """One port at many addresses. Those in `answers` answer, the others only accept."""

    def __init__(self) -> None:
        first = socket.create_server((WELL, 0), backlog=128)
        self.number = int(first.getsockname()[1])
        rest = [socket.create_server((address, self.number)) for address in SILENT]
        self.listeners = [first, *rest]
        self.answers = {WELL}
        self.taken: list[str] = []  # addresses of connections
        self._kept: list[socket.socket] = []
        for listener in self.listeners:
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            address = connection.getsockname()[0]
            self.taken.append(address)
            if address not in self.answers:
                self._kept.append(connection)
                continue
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + REPORT.dumps().encode())

    def close(self) -> None:
        for one in [*self.listeners, *self._kept]:
            one.close()


@pytest.fixture
def ports() -> Iterator[Ports]:
    made = Ports()
    yield made
    made.close()


@pytest.mark.fault("F38", shows="100 ports that accept and never answer delay no other service")
def test_a_hundred_silent_ports_do_not_slow_others(ports: Ports) -> None:
    """With eight workers each of which waits for its pod they took a minute, in every round."""
    reports = Reports(ports.number, 300.0)
    with ThreadPoolExecutor(8) as workers:
        for seconds in (5, 1):  # that they are silent is not known in the first round
            with within(seconds):
                for address in SILENT:
                    workers.submit(reports.read, address, address, False)
                reading = workers.submit(reports.read, "well", WELL, False).result()
            assert reading.report == REPORT
    assert set(ports.taken) == {*SILENT, WELL}


def test_a_pod_that_is_slow_to_answer_keeps_its_last_report_for_a_moment(ports: Ports) -> None:
    """Else its conditions would change with each poll, on a busy node."""
    now = [0.0]
    reports = Reports(ports.number, 300.0, clock=lambda: now[0])
    address = SILENT[0]
    ports.answers.add(address)
    assert reports.read("well", address, ready=False).report == REPORT
    ports.answers.remove(address)
    now[0] += SLOW_SECONDS - 1
    kept = reports.read("well", address, ready=False)
    assert (kept.report, kept.error) == (REPORT, "")
    now[0] += 1
    lost = reports.read("well", address, ready=False)
    assert lost.report is None and "no answer" in lost.error


def test_a_silent_pod_is_asked_less_and_less_often_until_it_answers(ports: Ports) -> None:
    now, address = [0.0], SILENT[0]
    asker = Asker(lambda: now[0], seconds=0.01)

    def poll() -> bytes | None:
        """A second after the last one; by then the last request has ended."""
        now[0] += 1.0
        time.sleep(0.03)
        try:
            return asker.ask("uid", Request(address, ports.number, REPORT_PATH))
        except Silent:
            return None

    for _ in range(90):
        assert poll() is None
    assert 4 < len(ports.taken) < 12
    ports.answers.add(address)
    assert eventually(poll, 30, on="server") == REPORT.dumps().encode()
    assert poll() is not None  # and at once from then on
