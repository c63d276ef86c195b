"""F38: ports that take connections and never answer slow nobody but their own service."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from waiting import eventually, limit, within

from kvline_contract.codec import dumps
from kvline_contract.load import Load
from kvline_contract.report import SizingReport, State
from kvline_operator.observe import ask
from kvline_operator.observe.ask import Answer, Asker, Request, Silent
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


def is_read(workers: ThreadPoolExecutor, reports: Reports) -> bool:
    """By one of the workers, behind what they have to do before."""
    return workers.submit(reports.read, "well", WELL, False).result().report == REPORT


@pytest.mark.fault("F38", shows="100 ports that accept and never answer delay no other service")
def test_a_hundred_silent_ports_do_not_slow_others(ports: Ports) -> None:
    """With eight workers each of which waits for its pod they took a minute, in every round."""
    reports = Reports(ports.number, 300.0)
    with ThreadPoolExecutor(8) as workers:
        for seconds in (5, 1):  # that they are silent is not known in the first round
            with within(seconds):
                for address in SILENT:
                    workers.submit(reports.read, address, address, False)
                eventually(partial(is_read, workers, reports), 5, on="server")
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


class Requests:
    """Requests that are answered when the test wants, so no time of this machine matters."""

    def __init__(self) -> None:
        self.sent: list[Future[Answer]] = []
        self.at_once: bytes | None = None  # the answer to each, from now on

    def begin(self) -> Future[Answer]:
        self.sent.append(Future())
        if self.at_once is not None:
            self.answer(self.at_once, 0.0)
        return self.sent[-1]

    def answer(self, body: bytes, seconds: float = 60.0) -> None:
        self.sent[-1].set_result(Answer(body, seconds))

    def end(self) -> None:
        """None is answered."""
        for request in self.sent:
            if not request.done():
                request.set_exception(Silent("no answer in time"))


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Requests:
    made = Requests()
    monkeypatch.setattr(Request, "begin", lambda *_: made.begin())
    monkeypatch.setattr(ask, "PATIENCE", 0.01)
    return made


def test_a_silent_pod_is_asked_less_and_less_often_until_it_answers(requests: Requests) -> None:
    now, body = [0.0], dumps(REPORT).encode()
    asker = Asker(lambda: now[0])

    def poll() -> bytes | None:
        """A second after the last one; by then the last request has ended."""
        requests.end()
        now[0] += 1.0
        try:
            return asker.ask("uid", Request(SILENT[0], 8001, REPORT_PATH))
        except Silent:
            return None

    assert [poll() for _ in range(90)] == [None] * 90
    assert 4 < len(requests.sent) < 12
    requests.at_once = body
    assert body in [poll() for _ in range(round(ask.LONGEST_PAUSE) + 1)]
    before = len(requests.sent)
    assert [poll() for _ in "123"] == [body] * 3  # and at once from then on
    assert len(requests.sent) == before + 3


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
        assert well.error in ("", f"no answer in time at {WELL}:{ports.number}")
        eventually(lambda: reports.read("well", WELL, True).report == REPORT, 2, on="server")
        eventually(lambda: reports.load("well", WELL) == LOAD, 2, on="server")
        assert {reports.load(address, address) for address in SILENT} == {None}
    assert not any(reading.report for reading in silent)
    with within(1):
        read_reports(pods, reports, loads=True)


def test_pods_that_take_a_moment_are_read_by_each_worker_that_asks(
    ports: Ports, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a start of the operator, when all services are reconciled at once."""
    monkeypatch.setattr(ask, "PATIENCE", limit(5))
    asker, eight = Asker(), SILENT[:8]
    ports.answers, ports.seconds = set(eight), 0.2

    def read(address: str) -> bytes:
        return asker.ask(address, Request(address, ports.number, REPORT_PATH))

    with ThreadPoolExecutor(8) as services:
        assert list(services.map(read, eight)) == [REPORT.dumps().encode()] * 8


def test_the_load_of_a_pod_that_is_always_late_is_known(requests: Requests) -> None:
    """Else nothing would be scaled down, since the delay starts again with each load missed."""
    now, body = [0.0], dumps(LOAD).encode()
    reports = Reports(8001, 300.0, 15.0, clock=lambda: now[0])
    assert reports.load("uid", SILENT[0]) is None
    for sent in (2, 3, 4):  # the next one is asked for in advance
        requests.answer(body)
        now[0] += 15.3
        assert reports.load("uid", SILENT[0]) == LOAD
        assert len(requests.sent) == sent
    requests.answer(body)
    requests.at_once = body
    for sent in (5, 5, 6, 7):  # once one was in time, no more is
        now[0] += 15.3
        assert reports.load("uid", SILENT[0]) == LOAD
        assert len(requests.sent) == sent


def test_a_load_is_used_for_two_intervals_while_its_pod_is_silent(requests: Requests) -> None:
    now = [0.0]
    reports = Reports(8001, 300.0, 15.0, clock=lambda: now[0])
    requests.at_once = dumps(LOAD).encode()
    assert reports.load("uid", SILENT[0]) == LOAD
    requests.at_once = None
    for seconds, known in ((15.0, LOAD), (29.0, LOAD), (31.0, None)):
        now[0] = seconds
        assert reports.load("uid", SILENT[0]) == known


def test_a_notice_that_was_answered_late_is_not_repeated(requests: Requests) -> None:
    notify = partial(Asker().ask, "uid", Request(SILENT[0], 8001, "/open", "POST"))
    with pytest.raises(Silent):
        notify()
    requests.answer(b"{}")
    assert notify() == b"{}" and len(requests.sent) == 1


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
