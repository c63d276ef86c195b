"""Plan: whether a candidate may take traffic. Product section 3, «Gate»; values in, a verdict out.

Only a measured shortfall or an engine's failure rejects. Whatever else keeps a candidate from being
measured holds it, and no report is never a pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from kvline_contract.report import Termination
from kvline_operator.threshold import Thresholds, device


class GateResult(StrEnum):
    PASSED = "Passed"
    HELD = "Held"
    REJECTED = "Rejected"


@dataclass(frozen=True, slots=True)
class Verdict:
    result: GateResult
    message: str
    measured: int = 0  # tokens of the replica furthest from what it must have; 0: none yet
    required: int = 0  # tokens that this replica must have; 0: no threshold
    baseline: int = 0  # tokens that the requirement is a share of; 0: none to compare with
    stuck: bool = False  # held by something that waiting alone may not end
    promoted: bool = False
    diagnosis: Termination | None = None  # what the engine that failed said of it
    expired: bool = False  # not ready by its deadline: what was taken away for it is brought back


@dataclass(frozen=True, slots=True)
class Kind:
    """What tokens are comparable within."""

    model: str  # without its commit
    gpus: int


@dataclass(frozen=True, slots=True)
class Measured:
    """A replica's validated size."""

    gpu: str  # its model; empty on a CPU
    tokens: int
    bytes_per_token: int


@dataclass(frozen=True, slots=True)
class Baseline:
    """What the revision that serves has proven since the last explicit acceptance."""

    kind: Kind
    bytes_per_token: int
    tokens: dict[str, int]  # the best of a revision's smallest replica, by GPU model


@dataclass(frozen=True, slots=True)
class Candidate:
    kind: Kind
    replicas: tuple[Measured, ...]
    failure: str = ""  # why its engine failed, when that rejects
    diagnosis: Termination | None = None  # its own words on that
    hindrance: str = ""  # what else keeps it from being measured
    stage: str = ""  # what it is doing, when nothing does
    promoted: bool = False


def judge(candidate: Candidate, proven: Baseline, policy: Thresholds) -> Verdict:
    """`policy` is what the spec asks for now."""
    measured = min((r.tokens for r in candidate.replicas), default=0)
    if candidate.promoted:
        text = "promoted by hand: measured against spec.capacity.minKVTokens alone"
        return Verdict(GateResult.PASSED, text, measured, promoted=True)
    if candidate.failure:
        return Verdict(
            GateResult.REJECTED, candidate.failure, measured, diagnosis=candidate.diagnosis
        )
    if not candidate.replicas:
        text = candidate.hindrance or candidate.stage or "no replica has been measured yet"
        return Verdict(GateResult.HELD, text, stuck=bool(candidate.hindrance))
    return _compare(candidate, proven, thresholds(candidate, proven, policy))


def thresholds(candidate: Candidate, proven: Baseline, policy: Thresholds) -> Thresholds:
    """What each replica of a candidate must have."""
    if candidate.promoted or incomparable(candidate, proven):
        return Thresholds(policy.minimum)
    return replace(policy, baseline=proven.tokens)


def incomparable(candidate: Candidate, proven: Baseline) -> str:
    """Why tokens of the two say nothing about each other; empty when they do."""
    if candidate.kind.model != proven.kind.model:
        return f"{candidate.kind.model} is another model than {proven.kind.model}"
    if candidate.kind.gpus != proven.kind.gpus:
        return f"{candidate.kind.gpus} GPUs a replica are not {proven.kind.gpus}"
    for replica in candidate.replicas:
        if replica.bytes_per_token != proven.bytes_per_token:
            return (
                f"a token takes {replica.bytes_per_token} bytes, not {proven.bytes_per_token}: "
                "another shape or number format"
            )
    return ""


def _compare(candidate: Candidate, proven: Baseline, limits: Thresholds) -> Verdict:
    """Each replica against the threshold of its own GPU model. The one furthest from it speaks; of
    those that have enough, one that could be compared."""
    worst = min(candidate.replicas, key=limits.distance)
    why = incomparable(candidate, proven)
    unknown = None if why else next((r for r in candidate.replicas if limits.unknown(r.gpu)), None)
    if worst.tokens < limits.of(worst.gpu).tokens:
        return _enough(GateResult.REJECTED, worst, limits, why)
    if unknown is not None:
        why = f"nothing has been validated on {device(unknown.gpu)} before"
        known = [r for r in candidate.replicas if not limits.unknown(r.gpu)]
        worst = min(known, key=limits.distance) if known and limits.minimum else unknown
    if why and not limits.minimum:
        text = (
            f"measured {worst.tokens} KV tokens, which cannot be compared ({why}): set "
            "spec.capacity.minKVTokens, or annotate kvline.dev/promote with this revision"
        )
        return Verdict(GateResult.HELD, text, worst.tokens, stuck=True)
    return _enough(GateResult.PASSED, worst, limits, why)


def _enough(result: GateResult, replica: Measured, limits: Thresholds, why: str) -> Verdict:
    """Whether a replica's tokens are, in words; `why` they are not compared, where that is so."""
    limit = limits.of(replica.gpu)
    text = f"measured {replica.tokens} KV tokens, {limit.tokens} are required ({limit.source})"
    if not limit.tokens:
        text = f"measured {replica.tokens} KV tokens, none are required"
    if result is GateResult.REJECTED:
        text += f": {limit.tokens - replica.tokens} short"
    if why:
        text += f"; not compared: {why}"
    return Verdict(result, text, replica.tokens, limit.tokens, limit.baseline)
