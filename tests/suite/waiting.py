"""How tests wait: for a state, never for a time, with a limit that fits this machine.

Limits are written as seconds on the machine of docs/testing.md. At the start of each stage `make
test` measures how much slower this machine is just then, and every limit is as much longer. What is
not there in time raises NotInTime, which alone is tried a second time (unstable.py). What the time
was spent on is counted for the run's table.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

SLOWNESS = "KVLINE_TEST_SLOWNESS"  # in the environment: 1.0 on the machine of speed.py
POLL_SECONDS = 0.1
KINDS = ("cluster", "pod", "garbage collector", "server", "sleep")


class NotInTime(AssertionError):
    """A limit has passed. Says nothing of a wrong value: what is wrong at once fails otherwise."""


def slowness() -> float:
    return float(os.environ.get(SLOWNESS, "1"))


def limit(seconds: float) -> float:
    """As many seconds as this machine needs for what takes `seconds` at most elsewhere."""
    return seconds * slowness()


_spent: defaultdict[str, float] = defaultdict(float)
_changing = threading.Lock()  # of the two below
_blocks: list[str] = []  # of spent that are open, of all threads
_since = 0.0  # when the first of them began, or was counted last


@contextmanager
def spent(on: str) -> Iterator[None]:
    """Counts the time of the block as waited for one of KINDS. The time of blocks that are open at
    once, in each other or in threads, counts once, as waited for what the first of them waits."""
    global _since
    assert on in KINDS, on
    with _changing:
        if not _blocks:
            _since = time.monotonic()
        _blocks.append(on)
    try:
        yield
    finally:
        with _changing:
            _count()
            _blocks.remove(on)


def _count() -> None:
    global _since
    now = time.monotonic()
    if _blocks:
        _spent[_blocks[0]] += now - _since
    _since = now


def taken() -> dict[str, float]:
    """Seconds by kind since the last call."""
    with _changing:
        _count()
        seconds = {kind: round(value, 3) for kind, value in _spent.items()}
        _spent.clear()
    return seconds


def count_sleeps() -> None:
    """From now on time.sleep of the main thread counts as «sleep» where nothing else does."""
    plain = time.sleep

    def sleep(seconds: float) -> None:
        if threading.current_thread() is not threading.main_thread():
            return plain(seconds)
        with spent("sleep"):
            plain(seconds)

    time.sleep = sleep  # type: ignore[assignment]


def eventually(
    check: Callable[[], Any], seconds: float = 30, on: str = "cluster", every: float = POLL_SECONDS
) -> Any:
    """Polls `check` until it is true, and returns that. Raises NotInTime with its last value."""
    end = time.monotonic() + limit(seconds)
    with spent(on):
        while not (value := check()):
            if time.monotonic() > end:
                raise NotInTime(f"not within {limit(seconds):.0f} s: {value!r}")
            time.sleep(every)
    return value


def settles(
    value: Callable[[], T],
    right: Callable[[T], Any] = bool,
    seconds: float = 30,
    on: str = "cluster",
    every: float = POLL_SECONDS,
) -> T:
    """Polls `value` until it is right, and returns it: for what comes right by itself, such as a
    count, or memory that is given back. Raises AssertionError with a value that has not changed for
    the last half of the limit, which is wrong, and NotInTime with one that still changes."""
    began = time.monotonic()
    found: list[T] = []  # the last one, once there is any
    changed = began
    with spent(on):
        while not right(now := value()):
            at = time.monotonic()
            if found != [now]:
                found, changed = [now], at
            if at > began + limit(seconds):
                if changed < began + limit(seconds) / 2:
                    raise AssertionError(f"has stayed {now!r} for {at - changed:.0f} s")
                raise NotInTime(f"not within {limit(seconds):.0f} s: {now!r}")
            time.sleep(every)
    return now


@contextmanager
def answered() -> Iterator[None]:
    """For a block that waits for an answer by a socket, a future or urllib, whose limit raises
    TimeoutError: a request that is never answered is lost, and not late. Raises AssertionError."""
    try:
        yield
    except TimeoutError as error:
        raise AssertionError("not answered") from error


async def answer_of(of: Awaitable[T], seconds: float = 10) -> T:
    """As `answered`, of what is awaited."""
    with answered():
        return await asyncio.wait_for(of, limit(seconds))


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raises NotInTime where the block takes longer; it is not interrupted."""
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    if took > limit(seconds):
        raise NotInTime(f"took {took:.1f} s, and may take {limit(seconds):.1f}")
