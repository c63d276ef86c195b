"""How tests wait: for a state, never for a time, with a limit that fits this machine.

Limits are written as seconds on the machine of docs/testing.md. At the start of each stage `make
test` measures how much slower this machine is just then, and every limit is as much longer. What is
not there in time raises NotInTime, which alone is tried a second time (unstable.py). What the time
was spent on is counted for the run's table.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SLOWNESS = "KVLINE_TEST_SLOWNESS"  # in the environment: 1.0 on the machine of docs/testing.md
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
_waiting = False


@contextmanager
def spent(on: str) -> Iterator[None]:
    """Counts the time of the block as waited for one of KINDS, unless an outer block counts it."""
    global _waiting
    assert on in KINDS, on
    if _waiting or threading.current_thread() is not threading.main_thread():
        yield
        return
    began, _waiting = time.monotonic(), True
    try:
        yield
    finally:
        _waiting = False
        _spent[on] += time.monotonic() - began


def taken() -> dict[str, float]:
    """Seconds by kind since the last call."""
    seconds = {kind: round(value, 3) for kind, value in _spent.items()}
    _spent.clear()
    return seconds


def count_sleeps() -> None:
    """From now on time.sleep of the main thread counts as «sleep» where nothing else does."""
    plain = time.sleep

    def sleep(seconds: float) -> None:
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


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raises NotInTime where the block takes longer; it is not interrupted."""
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    if took > limit(seconds):
        raise NotInTime(f"took {took:.1f} s, and may take {limit(seconds):.1f}")
