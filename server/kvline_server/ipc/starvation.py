"""How long a process has made no progress although it could run, as Linux's /proc tells it.

A thread that wants a CPU and gets none is starved: its node is busy, and ending the process would
only make the node busier. Whatever else a thread waits for is its own affair and counts: a lock, a
disk, a device (a driver waits asleep, or polls on a CPU that it has), a signal to go on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

CALM = 1.0  # seconds without progress in which nothing is read, and then between two readings
LATE = 2.0  # seconds between two readings, after which it was their reader that got no CPU
_TICK = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Thread:
    runnable: bool  # has a CPU, or wants one
    ran: float  # seconds, on a CPU
    waited: float  # seconds, for a CPU; up to when it last got one


Threads = Mapping[tuple[int, int], Thread]  # by process and thread id
_RAN, _WAITED = attrgetter("ran"), attrgetter("waited")


def threads(pids: Iterable[int]) -> Threads:
    """Of these processes; none of one that has ended."""
    found = {}
    for pid in pids:
        with suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/task"):
                with suppress(OSError):  # it ended meanwhile
                    found[pid, int(name)] = _thread(Path("/proc", str(pid), "task", name))
    return found


def _thread(folder: Path) -> Thread:
    fields = (folder / "stat").read_text().rpartition(")")[2].split()
    state, ran, waited = fields[0], (int(fields[11]) + int(fields[12])) * _TICK, 0.0
    with suppress(OSError):  # a kernel may be built without it
        nanoseconds = [int(number) for number in (folder / "schedstat").read_text().split()]
        ran, waited = nanoseconds[0] / 1e9, nanoseconds[1] / 1e9
    return Thread(state == "R", ran, waited)


def _most(before: Threads, after: Threads, account: Callable[[Thread], float]) -> float:
    """Seconds by which it grew between two readings, of the thread whose grew most. What a thread
    waits now is not in its account before it gets a CPU."""
    both = before.keys() & after.keys()
    return max((account(after[key]) - account(before[key]) for key in both), default=0.0)


def took(
    run: Callable[[], object],
    pids: Iterable[int],
    clock: Callable[[], float] = time.monotonic,
    read: Callable[[Iterable[int]], Threads] = threads,
) -> float:
    """Seconds that it takes, without those for which these processes waited for a CPU: at least
    what one of their threads ran. Another thread of theirs, which has nothing to do with it, may
    have waited as long, or longer: since before."""
    own, began = tuple(pids), clock()
    before = read(own)
    run()
    after = read(own)
    seconds = clock() - began
    ran = min(seconds, _most(before, after, _RAN))
    return max(ran, seconds - _most(before, after, _WAITED))


def starved(before: Threads, after: Threads, seconds: float) -> float:
    """How many of the `seconds` between two readings another process's most starved thread was. One
    that wanted a CPU at both was starved while it did not run."""
    most = _most(before, after, _WAITED)
    for key in before.keys() & after.keys():
        old, new = before[key], after[key]
        if old.runnable and new.runnable:
            most = max(most, seconds - (new.ran - old.ran) - 2 * _TICK)
    return min(seconds, most)


@dataclass(frozen=True, slots=True)
class _Account:
    since: float  # the progress that it is kept from
    read_at: float
    lost: float = 0.0  # seconds from `since` to `read_at` in which the processes were starved


class Quiet:
    """The time since the last progress of some processes, but for what they were starved of it.
    One thread reads them, any may ask."""

    def __init__(
        self,
        since: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
        read: Callable[[Iterable[int]], Threads] = threads,
    ) -> None:
        """`since`: when they last made progress, on the clock."""
        self._since = since
        self._clock = clock
        self._read = read
        self._known: Threads = {}
        self._account = _Account(since(), clock())

    def watch(self, pids: Iterable[int]) -> None:
        """To be called again and again. Reads nothing while there is progress."""
        now, since, old = self._clock(), self._since(), self._account
        passed = now - max(since, old.read_at)
        late = max(0.0, passed - LATE)
        if since != old.since:
            self._known, self._account = {}, _Account(since, now, late)
        elif now - since < CALM:
            self._account = _Account(since, now)
        elif passed >= CALM or not self._known:
            new = self._read(pids)
            lost = old.lost + max(late, starved(self._known, new, passed))
            self._known, self._account = new, _Account(since, now, lost)

    def seconds(self) -> float:
        now, since, account = self._clock(), self._since(), self._account
        if since != account.since:
            return max(0.0, min(now - since, LATE))
        return max(0.0, min(now, account.read_at + LATE) - since - account.lost)

    def by_the_clock(self) -> float:
        return self._clock() - self._since()
