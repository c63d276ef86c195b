"""A drain: until when it may last, and what became of the requests under way."""

from __future__ import annotations

import time

from kvline_server.ipc.messages import EdgeBeat

END_SECONDS = 3.0  # after a drain or an engine's end, for the errors of unfinished requests
MOST_END_SECONDS = 30.0  # by the clock, where a busy node gives HTTP no CPU for them
HURRY_SECONDS = 1.0  # for them at a second signal


class DrainState:
    """The outcome is as the HTTP processes count it: the parent hears only afterwards of what they
    did before the drain."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._began = time.monotonic()
        self._end = self._began + seconds + END_SECONDS
        self.hurried = False

    def hurry(self) -> None:
        """At a second signal clients have no more than the time to get their errors."""
        self._end, self.hurried = time.monotonic() + HURRY_SECONDS, True

    def is_over(self) -> bool:
        return time.monotonic() > self._end

    def summary(self, after: EdgeBeat) -> str:
        took = time.monotonic() - self._began
        cut = after.cut + after.active  # active: those of a process that is killed now
        if self.hurried:
            why = f"ended after {took:.1f} s, at once by a second signal"
        elif took >= self._seconds:
            why = f"ended after {took:.1f} s, as its drain of {self._seconds:g} s was over"
        else:
            why = f"drained in {took:.1f} s"
        return f"{why}: {after.drained} requests finished, {cut} cut off"
