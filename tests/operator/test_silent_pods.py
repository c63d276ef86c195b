"""F38: ports that take connections and never answer slow nobody but their own service."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from waiting import eventually, limit, within

from kvline_contract.codec import dumps
from kvline_contract.report import Load, SizingReport, State
from kvline_operator.observe import ask
from kvline_operator.observe.ask import Asker, Request, Silent
from kvline_operator.observe.children import read_reports
from kvline_operator.observe.reports import REPORT_PATH, SLOW_SECONDS, Reports

SILENT = [f"127.0.1.{number}" for number in range(1, 101)]
WELL = "127.0.2.1"
REPORT = SizingReport("well", "pod", "abcde", 3, State.PROBING, "t0", "t1")
LOAD = Load(1, 4096, 0, 0, 0, 0, 0, 0, 8, False)


class Ports:
    """One port at many addresses. Those in `answers` answer after `seconds`, the others only
    accept."""

    def __init__(self) -> None:
        first = socket.create_server((WELL, 0), backlog=128)
        self.number = int(first.getsockname()[1])
        rest = [socket.create_server((address, self.number)) for address in SILENT]
        self.listeners = [first, *rest]
        self.answers = {WELL}
        self.seconds = 0.0
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
                text = dumps(LOAD) if b" /load " in connection.recv(4096) else REPORT.dumps()
                time.sleep(self.seconds)
                with suppress(OSError):  # it is not waited for
                    connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + text.encode())

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


def pod(uid: str, address: str, ready: str = "True") -> dict[str, Any]:
    return {
        "metadata": {"uid": uid},
        "status": {
            "podIP": address,
            "containerStatuses": [{"name": "server", "state": {"running": {}}}],
            "conditions": [{"type": "Ready", "status": ready}],
        },
    }


def test_a_service_waits_once_for_all_its_silent_pods(ports: Ports) -> None:
    """Beside them a pod that takes a moment is read, with its load."""
    reports, pods = Reports(ports.number, 300.0), [pod(a, a) for a in SILENT]
    ports.seconds = 0.3
    with within(2):
        *silent, well = read_reports([*pods, pod("well", WELL)], reports, loads=True)
        assert well.report == REPORT and reports.load("well", WELL) == LOAD
        assert {reports.load(address, address) for address in SILENT} == {None}
    assert not any(reading.report for reading in silent)
    with within(1):
        read_reports(pods, reports, loads=True)


def test_pods_that_take_a_moment_are_read_by_each_worker_that_asks(ports: Ports) -> None:
    """As after a start of the operator, when all services are reconciled at once."""
    asker, eight = Asker(), SILENT[:8]
    ports.answers, ports.seconds = set(eight), 0.2

    def read(address: str) -> bytes:
        return asker.ask(address, Request(address, ports.number, REPORT_PATH))

    with ThreadPoolExecutor(8) as services:
        assert list(services.map(read, eight)) == [REPORT.dumps().encode()] * 8


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> float:
    """Seconds after which an answer is late."""
    monkeypatch.setattr(ask, "PATIENCE", limit(0.1))
    return limit(0.1)


def test_the_load_of_a_pod_that_is_always_late_is_known(ports: Ports, hasty: float) -> None:
    """Else nothing would be scaled down, since the delay starts again with each load missed."""
    now, address = [0.0], SILENT[0]
    reports = Reports(ports.number, 300.0, 15.0, clock=lambda: now[0])
    ports.answers, ports.seconds = {address}, 2 * hasty
    assert reports.load("uid", address) is None
    time.sleep(4 * hasty)
    for asked in (2, 3, 4):  # the next one is asked for in advance
        now[0] += 15.3
        assert reports.load("uid", address) == LOAD
        time.sleep(4 * hasty)
        assert len(ports.taken) == asked
    ports.seconds = 0.0
    for asked in (5, 5, 6, 7):  # once one was in time, no more is
        now[0] += 15.3
        assert reports.load("uid", address) == LOAD
        time.sleep(4 * hasty)
        assert len(ports.taken) == asked


def test_a_load_is_used_for_two_intervals_while_its_pod_is_silent(
    ports: Ports, hasty: float
) -> None:
    now, address = [0.0], SILENT[0]
    reports = Reports(ports.number, 300.0, 15.0, clock=lambda: now[0])
    ports.answers.add(address)
    assert reports.load("uid", address) == LOAD
    ports.answers.clear()
    for seconds, known in ((15.0, LOAD), (29.0, LOAD), (31.0, None)):
        now[0] = seconds
        assert reports.load("uid", address) == known


def test_a_notice_that_was_answered_late_is_not_repeated(ports: Ports, hasty: float) -> None:
    asker, address = Asker(), SILENT[0]
    ports.answers, ports.seconds = {address}, 2 * hasty
    notify = partial(asker.ask, "uid", Request(address, ports.number, "/open", "POST"))
    with pytest.raises(Silent):
        notify()
    time.sleep(4 * hasty)
    assert notify() and ports.taken == [address]


def test_a_silent_pod_has_one_error_and_a_bounded_pause(ports: Ports) -> None:
    """The text is in the status, which each other text would write anew."""
    now = [0.0]
    asker = Asker(lambda: now[0], seconds=0.01)
    errors = set()
    for _ in range(12):
        now[0] += 1.0
        time.sleep(0.03)
        with pytest.raises(Silent) as raised:
            asker.ask("uid", Request(SILENT[0], ports.number, REPORT_PATH))
        errors.add(str(raised.value))
    assert errors == {f"no answer in time at {SILENT[0]}:{ports.number}"}
    assert ask.pause(1) == 2.0 and ask.pause(10**6) == ask.LONGEST_PAUSE
