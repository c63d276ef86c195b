"""The log of a start: each stage as it begins, and at times how far it is.

A start may take minutes, in which an empty log looks like a process that hangs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime

from kvline_contract.progress import line
from kvline_contract.report import SizingReport

SECONDS = 10.0


class Narrator:
    def __init__(self, log: Callable[[str], None]) -> None:
        self.log = log
        self._stage: tuple[int, str] | None = None
        self._logged = 0.0
        self._lock = threading.Lock()

    def tell(self, report: SizingReport, clock: float, now: datetime) -> None:
        """`clock` in seconds, from any moment. Any thread may call it."""
        with self._lock:
            self._tell(report, clock, now)

    def _tell(self, report: SizingReport, clock: float, now: datetime) -> None:
        current = report.current
        if current is None:
            self._stage = None
            return
        stage = current.stage, current.what
        if stage == self._stage and clock - self._logged < SECONDS:
            return
        self._stage, self._logged = stage, clock
        self.log(line(report, now))
