"""A delaying work queue of keys, like client-go's: each key is queued at most once, processed by
one worker at a time, and retried with exponential backoff. Namespaces whose keys take long, as
where an admission webhook hangs, do not get all workers.

Takes its clock as an argument, so tests need no sleep.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable

from kvline_operator.api.key import Key

FIRST_DELAY = 1.0
LAST_DELAY = 60.0
SLOW = 5.0  # seconds; a key usually takes a fraction of one
REMEMBERED = 120.0  # seconds after a slow key in which its namespace counts as slow
KEPT = 2  # workers for namespaces that are not slow


class WorkQueue:
    def __init__(self, clock: Callable[[], float] = time.monotonic, workers: int = 8) -> None:
        self._clock = clock
        self._most_slow = max(1, workers - KEPT)  # keys of slow namespaces in work
        self._slow: dict[str, float] = {}  # by namespace: until when it counts as slow
        self._due: dict[Key, float] = {}  # when each waiting key is due
        self._heap: list[tuple[float, Key]] = []
        self._active: dict[Key, float] = {}  # keys in work, since when
        self._finished = clock()  # when a key last finished
        self._failures: dict[Key, int] = {}
        self._changed = asyncio.Event()

    def add(self, key: Key, delay: float = 0.0) -> None:
        """Queues the key for after `delay` seconds; the earliest of several times counts."""
        at = self._clock() + delay
        if key in self._due and self._due[key] <= at:
            return
        self._due[key] = at
        heapq.heappush(self._heap, (at, key))
        self._changed.set()

    def retry(self, key: Key, least: float = 0.0) -> float:
        """Queues the key after its backoff, at least `least` seconds; returns the delay."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        delay: float = max(least, min(FIRST_DELAY * 2.0 ** min(failures, 16), LAST_DELAY))
        self.add(key, delay)
        return delay

    def succeeded(self, key: Key) -> None:
        self._failures.pop(key, None)

    def pop(self) -> Key | None:
        """Takes a due key that no worker has, unless too many of slow namespaces are in work; None
        where there is none."""
        held = []
        found = None
        while self._heap and self._heap[0][0] <= self._clock():
            at, key = heapq.heappop(self._heap)
            if self._due.get(key) != at:
                continue  # superseded by an earlier time
            if self._waits(key):
                held.append((at, key))
                continue
            del self._due[key]
            self._active[key] = self._clock()
            found = key
            break
        for item in held:
            heapq.heappush(self._heap, item)
        return found

    def _waits(self, key: Key) -> bool:
        """For another to be done."""
        if key in self._active or not self._is_slow(key.namespace):
            return key in self._active
        slow = [other for other in list(self._active) if self._is_slow(other.namespace)]
        return len(slow) >= self._most_slow

    def _is_slow(self, namespace: str) -> bool:
        return self._slow.get(namespace, 0.0) > self._clock()

    def done(self, key: Key) -> None:
        self._finished = self._clock()
        since = self._active.pop(key, self._finished)
        if self._finished - since > SLOW:
            # Another one, as other threads read it.
            kept = {name: until for name, until in self._slow.items() if until > self._finished}
            self._slow = {**kept, key.namespace: self._finished + REMEMBERED}
        self._changed.set()

    async def get(self) -> Key:
        while True:
            key = self.pop()
            if key is not None:
                return key
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), self._until_next())
            except TimeoutError:
                continue

    def _until_next(self) -> float | None:
        waiting = [at for at, key in self._heap if not self._waits(key)]
        return max(0.0, min(waiting) - self._clock()) if waiting else None

    def oldest_overdue(self) -> float:
        """Seconds by which the most overdue key is late; 0 where none is."""
        waiting = list(self._due.items())  # a copy: called by other threads too
        late = [self._clock() - at for key, at in waiting if not self._waits(key)]
        return max([0.0, *late])

    def stalled(self) -> float:
        """Seconds since a key last finished while keys are due or in work; 0 where there are none.
        Each finished key is progress, however many are late."""
        now = self._clock()
        waits = [*list(self._active.values()), *list(self._due.values())]
        since = min((at for at in waits if at <= now), default=now)
        return now - max(since, min(self._finished, now))

    def __len__(self) -> int:
        return len(self._due)
