"""Time without progress, but for what a process was starved of CPU; of real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import pytest
from crowded import crowded_out

from kvline_server.ipc.starvation import CALM, LATE, Quiet, Thread, starved, threads, took

pytestmark = pytest.mark.process

SPINS, SLEEPS = "while True: pass", "import time; time.sleep(600)"
STOPPED = "stopped"


@contextmanager
def running(program: str) -> Iterator[int]:
    """The pid of a Python that runs it."""
    command = [sys.executable, "-c", f"print(flush=True); {program}"]
    if program == SPINS:
        command[-1] = f"print(flush=True)\n{program}"
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


def quiet_of(pid: int, seconds: float = 3.0) -> tuple[float, float]:
    """Seconds without progress as counted and by the clock, after some."""
    began = time.monotonic()
    quiet = Quiet(lambda: began)
    while time.monotonic() - began < seconds:
        quiet.watch([pid])
        time.sleep(0.1)
    return quiet.seconds(), quiet.by_the_clock()


def test_a_process_that_gets_no_cpu_has_not_been_quiet_for_long() -> None:
    with running(SPINS) as pid, crowded_out(pid):
        counted, clock = quiet_of(pid, 6.0)
    # Its share is a thirteenth, or a fifth; the second since the last reading may not count yet.
    assert counted < 2 * CALM + (clock - 2 * CALM) / 2


@pytest.mark.parametrize(
    ("program", "busy"),
    [(SPINS, False), (SLEEPS, False), (STOPPED, False), (SLEEPS, True), (STOPPED, True)],
)
def test_one_that_waits_for_something_else_or_has_a_cpu_has(program: str, busy: bool) -> None:
    """As a driver does that polls a device or waits for it asleep, or one that was stopped."""
    with running(SPINS if program == STOPPED else program) as pid:
        if program == STOPPED:
            os.kill(pid, signal.SIGSTOP)
        with crowded_out(pid) if busy else nullcontext():
            counted, clock = quiet_of(pid)
    # A spinning one shares the machine with what else it runs.
    assert counted > clock / (2 if program == SPINS else 1.2)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Progress:
    at = 0.0

    def __call__(self) -> float:
        return self.at


def test_a_reader_that_did_not_run_knows_nothing_of_others() -> None:
    """Neither of the time between two readings, nor of progress that nobody could tell it of."""
    clock, progress = Clock(), Progress()
    quiet = Quiet(progress, clock, lambda pids: {(1, 1): Thread(False, 0.0, 0.0)})
    for clock.now in (0.5, 1.0, 1.5, 2.0, 2.5, 3.0):
        quiet.watch([1])
    assert quiet.seconds() == 3.0
    clock.now = 100.0
    assert quiet.seconds() == 3.0 + LATE
    quiet.watch([1])
    assert quiet.seconds() == 3.0 + LATE
    progress.at, clock.now = 100.5, 150.0
    quiet.watch([1])
    assert quiet.seconds() == LATE
    clock.now = 151.0
    quiet.watch([1])
    assert quiet.seconds() == LATE + 1.0


def test_nothing_is_read_while_there_is_progress() -> None:
    clock, progress, read = Clock(), Progress(), list[float]()

    def note(pids: object) -> dict[tuple[int, int], Thread]:
        read.append(clock.now)
        return {}

    quiet = Quiet(progress, clock, note)
    for step in range(100):
        clock.now = step / 10
        progress.at = clock.now - 0.5
        quiet.watch([1])
    assert read == [] and quiet.seconds() == 0.5


@pytest.mark.parametrize(
    ("before", "after", "seconds"),
    [
        (Thread(False, 1.0, 0.0), Thread(False, 1.0, 0.0), 0.0),  # asleep
        (Thread(True, 1.0, 0.0), Thread(True, 3.0, 0.0), 0.0),  # on a CPU
        (Thread(True, 1.0, 0.0), Thread(True, 1.0, 0.0), 2.0),  # still in the queue for one
        (Thread(False, 1.0, 0.5), Thread(False, 1.2, 2.0), 1.5),  # by its account
        (Thread(False, 1.0, 0.0), Thread(True, 1.1, 90.0), 2.0),  # of which most is older
    ],
)
def test_a_thread_is_starved_while_it_wants_a_cpu_and_has_none(
    before: Thread, after: Thread, seconds: float
) -> None:
    idle = {(2, 2): Thread(False, 0.0, 0.0)}
    found = starved({(1, 1): before, **idle}, {(1, 1): after, **idle}, 2.0)
    assert found == pytest.approx(seconds, abs=0.03)


@pytest.mark.parametrize(
    ("ran", "waited", "seconds"),
    [
        (0.5, 0.5, 9.5),  # on a CPU for a part of it, asleep for the rest
        (2.0, 8.0, 2.0),
        (2.0, 40.0, 2.0),  # another waited since before
        (12.0, 40.0, 10.0),  # accounts are not read at one time
    ],
)
def test_what_a_run_took_is_at_least_what_a_thread_ran(
    ran: float, waited: float, seconds: float
) -> None:
    clock = Clock()
    accounts = [
        {(1, 1): Thread(True, 3.0, 1.0), (1, 2): Thread(True, 0.0, 5.0)},
        {(1, 1): Thread(True, 3.0 + ran, 1.0), (1, 2): Thread(False, 0.0, 5.0 + waited)},
    ]

    def run() -> None:
        clock.now += 10.0

    found = took(run, [1], clock, lambda pids: accounts.pop(0))
    assert found == pytest.approx(seconds)


def test_a_run_takes_time_beside_threads_that_wait_for_a_cpu() -> None:
    """As tests of encoders had none, beside a thread of another test."""
    ended = threading.Event()

    def wake() -> None:
        while not ended.is_set():
            time.sleep(0.001)

    others = [threading.Thread(target=wake) for _ in range(8)]
    for other in others:
        other.start()
    try:
        with running(SPINS), running(SPINS), running(SPINS):
            found = [took(lambda: sum(range(20_000)), [os.getpid()]) for _ in range(200)]
    finally:
        ended.set()
        for other in others:
            other.join()
    assert min(found) > 0


def test_threads_of_a_process_that_has_ended_are_none() -> None:
    with running(SLEEPS) as pid:
        assert (pid, pid) in threads([pid])
    assert threads([pid]) == {}
