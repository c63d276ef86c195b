"""How many requests were refused within the last minute: demand that never became a sequence."""

from __future__ import annotations

from collections import deque

WINDOW_SECONDS = 60.0


class RecentRefusals:
    def __init__(self) -> None:
        self._events: deque[tuple[float, int]] = deque(maxlen=1024)

    def add(self, count: int, now: float) -> None:
        if count > 0:
            self._events.append((now, count))

    def count(self, now: float) -> int:
        return sum(count for at, count in list(self._events) if now - at <= WINDOW_SECONDS)
