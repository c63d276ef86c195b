"""What an engine reports, second by second: every stage, each retry, each failure. Pure.

A play is a name, a pod and the seconds since its start; the same three give the same report.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvline_contract.exits import ExitCode, meaning
from kvline_contract.load import Load
from kvline_contract.memory import MemoryV1
from kvline_contract.report import (
    VERSION,
    Attempt,
    Effective,
    Outcome,
    Provenance,
    Result,
    SizingReport,
    Source,
    Stage,
    State,
    Termination,
)

TOKENS = 100_000
WHEN = "2026-11-22T00:00:00Z"  # the same at each poll, as a real one's is
MEMORY = MemoryV1(81920, 15000, 3000, 500, 62820, 400, 200).upgraded()
EFFECTIVE = Effective(8192, 256, 8192, 20, 256, 16, 256)
ORDER = (State.LOADING, State.AUTOTUNING, State.PROBING, State.STRESSING, State.VALIDATING)
FAILURES = {code.title.lower(): code for code in ExitCode if code >= 20}


@dataclass(frozen=True, slots=True)
class Play:
    """`good`, `shrunk`, `small`, `silent`, `garbage`, or the name of an exit code in lower case."""

    name: str
    step: float = 0.5  # seconds of each stage

    @classmethod
    def of(cls, service: str) -> Play:
        """By the service's name, such as `shrunk-17`; what is no play is a good one."""
        word = service.partition("-")[0]
        known = {"good", "shrunk", "small", "silent", "garbage", *FAILURES}
        return cls(word if word in known else "good")

    @property
    def exit_code(self) -> int | None:
        return FAILURES.get(self.name)

    @property
    def tokens(self) -> int:
        factor = {"shrunk": 95, "small": 40}.get(self.name, 100)
        return TOKENS * factor // 100

    def states(self) -> tuple[State, ...]:
        if self.name == "shrunk":
            return (*ORDER, State.SHRUNK_RETRY, State.VALIDATING)
        return ORDER

    def ended(self, seconds: float) -> bool:
        return self.exit_code is not None and seconds >= len(ORDER) * self.step

    def validated(self, seconds: float) -> bool:
        return self.exit_code is None and seconds >= len(self.states()) * self.step

    def report(self, uid: str, pod: str, revision: str, seconds: float) -> SizingReport:
        states = self.states()
        at = min(int(seconds / self.step), len(states))
        failed, validated = self.ended(seconds), self.validated(seconds)
        passed = states[:at]
        state = State.FAILED if failed else State.VALIDATED if validated else states[at]
        return SizingReport(
            pod_uid=uid,
            pod_name=pod,
            revision=revision,
            sequence=at,
            state=state,
            started_at=WHEN,
            updated_at=WHEN,
            effective=EFFECTIVE if at > 1 else None,
            stages=tuple(Stage(str(s), round(1000 * self.step), 0) for s in passed),
            attempts=self._attempts(passed, state),
            result=self._result() if validated else None,
            failure=self.termination() if failed else None,
            provenance=Provenance("Fake GPU", "1.0", "image", "", {}) if validated else None,
        )

    def _attempts(self, passed: tuple[State, ...], state: State) -> tuple[Attempt, ...]:
        tried = [s for s in (*passed, state) if s is State.VALIDATING]
        out = []
        for number in range(1, len(tried) + 1):
            last = number == len(tried)
            outcome = Outcome.OUT_OF_MEMORY
            if last:
                outcome = Outcome.SURVIVED if state is State.VALIDATED else Outcome.RUNNING
            if last and state in (State.FAILED, State.SHRUNK_RETRY):
                outcome = Outcome.OUT_OF_MEMORY
            out.append(Attempt(number, TOKENS * (105 - 5 * number) // 100, outcome, None))
        return tuple(out)

    def _result(self) -> Result:
        loop = round(1000 * self.step * len(self.states()))
        return Result(
            self.tokens, 131072, Source.MEASURED, "f" * 32, 80000, loop, 0, WHEN, (MEMORY,)
        )

    def termination(self) -> Termination:
        code = meaning(self.exit_code or 0)
        message = f"the conformance fake plays {code.title}"
        return Termination.of(code, message)

    def load(self) -> Load:
        return Load(VERSION, self.tokens, self.tokens // 10, 0, 0, 1, 0, 0, 256, False)
