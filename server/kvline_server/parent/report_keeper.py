"""The sizing report in the parent process: built from progress messages, served to the operator.

Thread-safe; every change raises the sequence number. Never imports torch.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace

from kvline_contract import times
from kvline_contract.report import (
    MAX_ATTEMPTS,
    MAX_STAGES,
    MAX_WARNINGS,
    Outcome,
    SizingReport,
    State,
    Termination,
)
from kvline_server.messages import Progress


class ReportKeeper:
    def __init__(self, pod_uid: str, pod_name: str, revision: str) -> None:
        self._lock = threading.Lock()
        self.changed_at = time.monotonic()
        self._report = SizingReport(
            pod_uid=pod_uid,
            pod_name=pod_name,
            revision=revision,
            sequence=0,
            state=State.LOADING,
            started_at=times.now(),
            updated_at=times.now(),
        )

    @property
    def report(self) -> SizingReport:
        return self._report

    def apply(self, progress: Progress) -> None:
        """Applies one progress message."""
        known = self._report
        if progress.state is not None:
            self._change(state=progress.state)
        if progress.stage is not None:
            ended = tuple(s for s in known.stages if s.total_bytes is None)
            self._change(stages=(*ended, progress.stage)[-MAX_STAGES:])
        if progress.effective is not None:
            self._change(effective=progress.effective)
        if (attempt := progress.attempt) is not None:
            kept = tuple(a for a in known.attempts if a.number != attempt.number)
            self._change(attempts=(*kept, attempt)[-MAX_ATTEMPTS:])
        if progress.provenance is not None:
            self._change(provenance=progress.provenance)
        if progress.result is not None:
            self._change(state=State.VALIDATED, result=progress.result)
        if progress.failure is not None:
            self.fail(progress.failure)
        if progress.warning is not None:
            self.warn(progress.warning)

    def touch(self) -> None:
        """There is progress that the report does not show."""
        self.changed_at = time.monotonic()

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
                updated_at=times.now(),
                **values,  # type: ignore[arg-type]
            )
            self.changed_at = time.monotonic()
