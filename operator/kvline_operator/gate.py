"""Plan: whether a candidate may take traffic. Product section 3, «Gate»; values in, a verdict out.

Only a measured shortfall or an engine's failure rejects. Whatever else keeps a candidate from being
measured holds it, and no report is never a pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    PASS = "Pass"  # noqa: S105
    HOLD = "Hold"
    FAIL = "Fail"


@dataclass(frozen=True, slots=True)
class Verdict:
    outcome: Outcome
    message: str
    measured: int = 0  # tokens of the candidate's smallest replica; 0: none yet
    required: int = 0  # tokens that each of its replicas must have; 0: no threshold
    baseline: int = 0  # tokens that the requirement is a share of; 0: none to compare with
    stuck: bool = False  # held by something that waiting alone may not end
    promoted: bool = False


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
class Proven:
    """What the revision that serves has proven since the last explicit acceptance."""

    kind: Kind
    bytes_per_token: int
    tokens: dict[str, int]  # the best of a revision's smallest replica, by GPU model


@dataclass(frozen=True, slots=True)
class Candidate:
    kind: Kind
    replicas: tuple[Measured, ...]
    failure: str = ""  # why its engine failed, when that rejects
    hindrance: str = ""  # what else keeps it from being measured
    stage: str = ""  # what it is doing, when nothing does
    promoted: bool = False


def judge(candidate: Candidate, proven: Proven, minimum: int, percent: int) -> Verdict:
    """`minimum` is spec.capacity.minKVTokens, `percent` spec.rollout.minCapacityPercent."""
    measured = min((r.tokens for r in candidate.replicas), default=0)
    if candidate.promoted:
        text = "promoted by hand: measured against spec.capacity.minKVTokens alone"
        return Verdict(Outcome.PASS, text, measured, promoted=True)
    if candidate.failure:
        return Verdict(Outcome.FAIL, candidate.failure, measured)
    if not candidate.replicas:
        text = candidate.hindrance or candidate.stage or "no replica has been measured yet"
        return Verdict(Outcome.HOLD, text, stuck=bool(candidate.hindrance))
    why = incomparable(candidate, proven)
    if why:
        return _alone(measured, minimum, why)
    baseline = max(proven.tokens[r.gpu] for r in candidate.replicas)
    share = -(-percent * baseline // 100)
    required = max(minimum, share)
    source = f"{percent} % of {baseline}" if share >= minimum else "spec.capacity.minKVTokens"
    return _compare(measured, required, baseline, f"{required} are required ({source})")


def incomparable(candidate: Candidate, proven: Proven) -> str:
    """Why tokens of the two say nothing about each other; empty when they do."""
    if candidate.kind.model != proven.kind.model:
        return f"{candidate.kind.model} is another model than {proven.kind.model}"
    if candidate.kind.gpus != proven.kind.gpus:
        return f"{candidate.kind.gpus} GPUs a replica are not {proven.kind.gpus}"
    for replica in candidate.replicas:
        if replica.gpu not in proven.tokens:
            return f"nothing has been proven on {replica.gpu or 'a CPU'} before"
        if replica.bytes_per_token != proven.bytes_per_token:
            return (
                f"a token takes {replica.bytes_per_token} bytes, not {proven.bytes_per_token}: "
                "another shape or number format"
            )
    return ""


def _alone(measured: int, minimum: int, why: str) -> Verdict:
    """Tokens that cannot be compared: the service's own minimum decides, or a person."""
    if not minimum:
        text = (
            f"measured {measured} KV tokens, which cannot be compared ({why}): set "
            "spec.capacity.minKVTokens, or annotate kvline.dev/promote with this revision"
        )
        return Verdict(Outcome.HOLD, text, measured, stuck=True)
    return _compare(
        measured, minimum, 0, f"spec.capacity.minKVTokens asks for {minimum}; not compared: {why}"
    )


def _compare(measured: int, required: int, baseline: int, against: str) -> Verdict:
    if measured >= required:
        text = f"measured {measured} KV tokens, {against}"
        return Verdict(Outcome.PASS, text, measured, required, baseline)
    text = f"measured {measured} KV tokens, {against}: {required - measured} short"
    return Verdict(Outcome.FAIL, text, measured, required, baseline)
