"""The gate's verdict on a revision, as it is decided and as it is stored."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvline_contract.codec import document, field
from kvline_contract.report import Termination

MAX_MESSAGE = 2048  # characters


class GateResult(StrEnum):
    PASSED = "Passed"
    HELD = "Held"
    REJECTED = "Rejected"


class Phase(StrEnum):
    """Where a revision is on its way; plan/phase.py derives it."""

    NEW = "New"  # it would have to be measured before it takes traffic
    MEASURING = "Measuring"
    HELD = "Held"  # cannot be measured or compared, which may need a person
    PASSED = "Passed"  # takes traffic as its replicas become ready
    REJECTED = "Rejected"
    EXPIRED = "Expired"  # not ready within progressDeadlineSeconds, the stable one came back
    ACCEPTED = "Accepted"  # the stable revision


@document
class Sequences:
    """A verdict's figures of sequences, of a model whose layers keep recurrent states."""

    measured: int  # of the replica with the smallest margin
    required: int = 0
    baseline: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    result: GateResult
    message: str
    measured: int = 0  # KV tokens of the replica with the smallest margin; 0: none measured
    required: int = 0  # threshold of that replica; 0: none
    baseline: int = 0  # that `required` is a percentage of; 0: none to compare with
    blocked: bool = False  # held by something that may need a person
    promoted: bool = False
    diagnosis: Termination | None = None  # termination message of the failed engine
    expired: bool = False  # past progressDeadlineSeconds: the stable revision is scaled up again
    promotion_refused: str = ""  # why spec.rollout.promote, which names the revision, does not hold
    sequences: Sequences | None = None

    @property
    def phase(self) -> Phase:
        """Of the revision on which it is the verdict now."""
        if self.expired:
            return Phase.EXPIRED
        if self.result is GateResult.HELD:
            return Phase.HELD if self.blocked else Phase.MEASURING
        return Phase.PASSED if self.result is GateResult.PASSED else Phase.REJECTED


@document
class StoredVerdict:
    """A verdict that passed or rejected its revision."""

    result: GateResult
    against: int  # `accepted` of the revision that was stable then; 0: it counts no more
    measured: int = 0
    required: int = 0
    baseline: int = 0
    message: str = field(limit=MAX_MESSAGE, default="")
    promoted: bool = False
    diagnosis: Termination | None = field(omit_none=True, default=None)
    sequences: Sequences | None = field(omit_none=True, default=None)

    @classmethod
    def of(cls, verdict: Verdict, against: int) -> StoredVerdict:
        return cls(
            result=verdict.result,
            against=against,
            measured=verdict.measured,
            required=verdict.required,
            baseline=verdict.baseline,
            message=verdict.message[:MAX_MESSAGE],
            promoted=verdict.promoted,
            diagnosis=verdict.diagnosis,
            sequences=verdict.sequences,
        )

    def verdict(self) -> Verdict:
        return Verdict(
            result=self.result,
            message=self.message,
            measured=self.measured,
            required=self.required,
            baseline=self.baseline,
            promoted=self.promoted,
            diagnosis=self.diagnosis,
            sequences=self.sequences,
        )

    @property
    def word(self) -> str:
        """Passed, Rejected or Promoted."""
        return "Promoted" if self.promoted else str(self.result)
