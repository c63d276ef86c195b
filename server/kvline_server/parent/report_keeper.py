"""The sizing report in the parent process: built from progress messages, served to the operator.

Thread-safe; every change raises the sequence number. Never imports torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from kvline_contract.codec import decode, loads
from kvline_contract.report import (
    MAX_REPORT_BYTES,
    MAX_STAGES,
    MAX_WARNINGS,
    Attempt,
    Effective,
    Outcome,
    Provenance,
    Result,
    SizingReport,
    Stage,
    State,
    Termination,
)
from kvline_server.messages import Progress

Clock = Callable[[], str]


class ReportKeeper:
    def __init__(self, pod_uid: str, pod_name: str, revision: str, clock: Clock) -> None:
        self._lock = threading.Lock()
        self._clock = clock
        self.changed_at = time.monotonic()
        self._report = SizingReport(
            pod_uid=pod_uid,
            pod_name=pod_name,
            revision=revision,
            sequence=0,
            state=State.LOADING,
            started_at=clock(),
            updated_at=clock(),
        )

    @property
    def report(self) -> SizingReport:
        return self._report

    def apply(self, progress: Progress) -> None:
        """Applies one progress message."""
        if progress.kind == "state":
            self._change(state=State(progress.body.decode()))
            return
        if progress.kind == "warning":
            self.warn(progress.body.decode())
            return
        value = loads(progress.body, MAX_REPORT_BYTES)
        if progress.kind == "stage":
            known = tuple(s for s in self._report.stages if s.total_bytes is None)
            self._change(stages=(*known, decode(Stage, value, strict=True))[-MAX_STAGES:])
        elif progress.kind == "effective":
            self._change(effective=decode(Effective, value, strict=True))
        elif progress.kind == "attempt":
            self._change(
                attempts=_merge(self._report.attempts, decode(Attempt, value, strict=True))
            )
        elif progress.kind == "provenance":
            self._change(provenance=decode(Provenance, value, strict=True))
        elif progress.kind == "result":
            self._change(state=State.VALIDATED, result=decode(Result, value, strict=True))
        elif progress.kind == "failure":
            self.fail(decode(Termination, value, strict=True))

    def fail(self, failure: Termination) -> None:
        self._change(state=State.FAILED, failure=failure, result=None)

    def warn(self, text: str) -> None:
        self._change(warnings=(*self._report.warnings, text[:512])[-MAX_WARNINGS:])

    def restart(self, warning: str) -> None:
        """The engine was killed and restarts: stages are reset, attempts are kept."""
        attempts = tuple(
            replace(a, outcome=Outcome.KILLED) if a.outcome is Outcome.RUNNING else a
            for a in self._report.attempts
        )
        self._change(state=State.SHRUNK_RETRY, stages=(), attempts=attempts)
        self.warn(warning)

    def _change(self, **values: object) -> None:
        with self._lock:
            self._report = replace(
                self._report,
                sequence=self._report.sequence + 1,
                updated_at=self._clock(),
                **values,  # type: ignore[arg-type]
            )
            self.changed_at = time.monotonic()


def _merge(attempts: tuple[Attempt, ...], update: Attempt) -> tuple[Attempt, ...]:
    kept = tuple(a for a in attempts if a.number != update.number)
    return (*kept, update)[-5:]
