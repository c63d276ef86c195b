"""A queue of keys: each at most once, one worker a key, per-key backoff, delayed adds.

Takes its clock as an argument, so tests need no sleep. The shape is client-go's workqueue's.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass

FIRST_DELAY = 1.0
LAST_DELAY = 300.0


@dataclass(frozen=True, slots=True, order=True)
class Key:
    namespace: str
    name: str


class WorkQueue:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._due: dict[Key, float] = {}  # when each waiting key may run, the earliest wish
        self._heap: list[tuple[float, Key]] = []
        self._active: dict[Key, float] = {}  # since when somebody works on it
        self._finished = clock()  # when a key was last done
        self._failures: dict[Key, int] = {}
        self._news = asyncio.Event()

    def add(self, key: Key, delay: float = 0.0) -> None:
        """Runs the key once at or after `delay`; an earlier wish wins over a later one."""
        at = self._clock() + delay
        if key in self._due and self._due[key] <= at:
            return
        self._due[key] = at
        heapq.heappush(self._heap, (at, key))
        self._news.set()

    def retry(self, key: Key, least: float = 0.0) -> float:
        """Runs the key again after its backoff, `least` seconds from now; gives the delay."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        delay: float = max(least, min(FIRST_DELAY * 2.0 ** min(failures, 16), LAST_DELAY))
        self.add(key, delay)
        return delay

    def succeeded(self, key: Key) -> None:
        self._failures.pop(key, None)

    def pop(self) -> Key | None:
        """A key that is due and that nobody works on, now in work; None when there is none."""
        held = []
        found = None
        while self._heap and self._heap[0][0] <= self._clock():
            at, key = heapq.heappop(self._heap)
            if self._due.get(key) != at:
                continue  # an earlier wish has run already
            if key in self._active:
                held.append((at, key))
                continue
            del self._due[key]
            self._active[key] = self._clock()
            found = key
            break
        for item in held:
            heapq.heappush(self._heap, item)
        return found

    def done(self, key: Key) -> None:
        self._active.pop(key, None)
        self._finished = self._clock()
        self._news.set()

    async def get(self) -> Key:
        while True:
            key = self.pop()
            if key is not None:
                return key
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), self._until_next())
            except TimeoutError:
                continue

    def _until_next(self) -> float | None:
        waiting = [at for at, key in self._heap if key not in self._active]
        return max(0.0, min(waiting) - self._clock()) if waiting else None

    def oldest_overdue(self) -> float:
        """Seconds by which the most overdue key is late; 0 when none is."""
        waiting = list(self._due.items())  # at once: other threads ask too
        late = [self._clock() - at for key, at in waiting if key not in self._active]
        return max([0.0, *late])

    def stalled(self) -> float:
        """Seconds without any key done while there were keys to work on; 0 when there are none.
        However many are late, each one that is done is progress."""
        now = self._clock()
        waits = [*list(self._active.values()), *list(self._due.values())]
        since = min((at for at in waits if at <= now), default=now)
        return now - max(since, min(self._finished, now))

    def __len__(self) -> int:
        return len(self._due)
