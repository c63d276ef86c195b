"""The gate's verdict on a revision, as it is decided and stored."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvline_contract.report import Termination


class GateResult(StrEnum):
    PASSED = "Passed"
    HELD = "Held"
    REJECTED = "Rejected"


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
