"""The sizing report in the parent process: built from progress messages, served to the operator.

Thread-safe; every change raises the sequence number. Never imports torch.
"""

from __future__ import annotations

import re
import threading
import time
from dataclasses import replace

from kvline_contract import times
from kvline_contract.report import (
    MAX_ATTEMPTS,
    MAX_WARNINGS,
    START_STAGES,
    Current,
    Outcome,
    SizingReport,
    State,
    Termination,
    summed,
)
from kvline_server.ipc.messages import Progress

MAX_WARNING = 500  # characters, beside a rank's name


class ReportKeeper:
    def __init__(self, pod_uid: str, pod_name: str, revision: str) -> None:
        self._lock = threading.RLock()
        self.changed_at = time.monotonic()
        self.probed_ms: int | None = None  # that the longest step of the probes took
        self._report = SizingReport(
            pod_uid=pod_uid,
            pod_name=pod_name,
            revision=revision,
            sequence=0,
            state=State.LOADING,
            started_at=times.now(),
            updated_at=times.now(),
            current=_loads(),
        )

    @property
    def report(self) -> SizingReport:
        return self._report

    def apply(self, progress: Progress) -> None:
        """Applies one progress message."""
        known = self._report
        current = {"state": progress.state, "current": progress.current}
        if reported := {name: value for name, value in current.items() if value is not None}:
            self._change(**reported)  # in one change: reason and message of a condition
        if progress.stage is not None:
            ended = tuple(s for s in known.stages if s.total_bytes is None)
            self._change(stages=summed((*ended, progress.stage)))
        if progress.probed_ms is not None:
            self.probed_ms = max(self.probed_ms or 0, progress.probed_ms)
        if progress.effective is not None:
            self._change(effective=progress.effective)
        if (attempt := progress.attempt) is not None:
            kept = tuple(a for a in known.attempts if a.number != attempt.number)
            self._change(attempts=(*kept, attempt)[-MAX_ATTEMPTS:])
        if progress.provenance is not None:
            self._change(provenance=progress.provenance)
        if progress.result is not None:
            self._change(state=State.VALIDATED, result=progress.result, current=None)
        if progress.failure is not None:
            self.fail(progress.failure)
        if progress.warning is not None:
            self.warn(progress.warning)

    def touch(self) -> None:
        """There is progress that the report does not show."""
        self.changed_at = time.monotonic()

    def fail(self, failure: Termination) -> None:
        self._change(state=State.FAILED, failure=failure, result=None, current=None)

    def warn(self, text: str, rank: int = 0) -> bool:
        """One of a rank other than 0 names it, unless several ranks warn of the same.
        -> whether it is new"""
        text, named = text[:MAX_WARNING], f"rank {rank}: {text[:MAX_WARNING]}"
        of_a_rank = re.compile(rf"rank \d+: {re.escape(text)}")
        with self._lock:
            known = self._report.warnings
            if rank and (text in known or named in known):
                return False
            others = [each for each in known if not of_a_rank.fullmatch(each)]
            alone = bool(rank) and len(others) == len(known)
            self._change(warnings=(*others, named if alone else text)[-MAX_WARNINGS:])
            return len(others) == len(known)

    def restart(self, warning: str) -> None:
        """The engine was killed and restarts: stages are reset, attempts are kept."""
        attempts = tuple(
            replace(a, outcome=Outcome.KILLED) if a.outcome is Outcome.RUNNING else a
            for a in self._report.attempts
        )
        self.probed_ms = None
        again = _loads("loads the model again, for a smaller KV cache")
        self._change(state=State.SHRUNK_RETRY, stages=(), attempts=attempts, current=again)
        self.warn(warning)

    def _change(self, **values: object) -> None:
        with self._lock:
            self._report = replace(
                self._report,
                sequence=self._report.sequence + 1,
                updated_at=times.now(),
                **values,  # type: ignore[arg-type]
            )
            self.changed_at = time.monotonic()


def _loads(what: str = "loads the model") -> Current:
    """From when the engine's process is started: it imports its libraries first."""
    return Current(1, START_STAGES, what, times.now())
