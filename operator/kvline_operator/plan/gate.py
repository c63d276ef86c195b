"""The gate, which decides whether a candidate may take traffic. Pure.

Only a measured shortfall or a failed engine rejects a candidate. Anything else that prevents a
measurement holds it; without a sizing report nothing passes. See docs/operations.md, Rollouts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvline_contract.counts import counted
from kvline_contract.launch import KVCacheDtype
from kvline_contract.report import Termination
from kvline_operator.observe.pods import Measured
from kvline_operator.plan.threshold import Thresholds, device
from kvline_operator.store.verdict import GateResult, Verdict


@dataclass(frozen=True, slots=True)
class ComparisonGroup:
    """KV tokens of two replicas are compared only where these are equal."""

    model: str  # source without the commit
    gpus: int  # per replica
    ranks: int = 1  # per replica: one on each GPU, or all on the CPU
    kv_cache_dtype: str = KVCacheDtype.AUTO  # a stored one may be of a newer operator

    @property
    def devices(self) -> str:
        if not self.gpus:
            return "a CPU" if self.ranks == 1 else f"{self.ranks} CPU ranks"
        return counted(self.gpus, "GPU")


@dataclass(frozen=True, slots=True)
class Baseline:
    """The best sizes validated since the first revision or the last promotion."""

    group: ComparisonGroup
    bytes_per_token: int
    tokens: dict[str, int]  # by GPU model; of a revision the smallest replica counts


@dataclass(frozen=True, slots=True)
class Candidate:
    group: ComparisonGroup
    replicas: tuple[Measured, ...]
    failure: str = ""  # why its engine failed, where that rejects the revision
    diagnosis: Termination | None = None  # the engine's termination message
    blocker: str = ""  # what else prevents the measurement
    stage: str = ""  # progress, where nothing does
    promoted: bool = False


def evaluate(candidate: Candidate, baseline: Baseline, policy: Thresholds) -> Verdict:
    """The verdict on a candidate; `policy` has the thresholds of the current spec."""
    measured = min((r.tokens for r in candidate.replicas), default=0)
    if candidate.promoted:
        text = "promoted by hand: measured against spec.capacity.minKVTokens alone"
        return Verdict(GateResult.PASSED, text, measured, promoted=True)
    if candidate.failure:
        return Verdict(
            GateResult.REJECTED, candidate.failure, measured, diagnosis=candidate.diagnosis
        )
    if not candidate.replicas:
        text = candidate.blocker or candidate.stage or "no replica has been measured yet"
        return Verdict(GateResult.HELD, text, blocked=bool(candidate.blocker))
    return _compare(candidate, baseline, thresholds(candidate, baseline, policy))


def thresholds(candidate: Candidate, baseline: Baseline, policy: Thresholds) -> Thresholds:
    """The KV tokens that each replica of a candidate must have."""
    if candidate.promoted or incomparable(candidate, baseline):
        return Thresholds(policy.minimum)
    return replace(policy, baseline=baseline.tokens)


def incomparable(candidate: Candidate, baseline: Baseline) -> str:
    """Why the two cannot be compared; empty where they can."""
    if candidate.group.model != baseline.group.model:
        return f"{candidate.group.model} is another model than {baseline.group.model}"
    new, old = candidate.group.kv_cache_dtype, baseline.group.kv_cache_dtype
    if new != old:
        return f"spec.engine.kvCacheDtype is {new}, not {old}: tokens of another size"
    if candidate.group != baseline.group:
        return f"a replica has {candidate.group.devices}, not {baseline.group.devices}"
    for replica in candidate.replicas:
        if replica.bytes_per_token != baseline.bytes_per_token:
            return (
                f"a token takes {replica.bytes_per_token} bytes, not {baseline.bytes_per_token}: "
                "another shape or number format"
            )
    return ""


def _compare(candidate: Candidate, baseline: Baseline, limits: Thresholds) -> Verdict:
    """Compares each replica with the threshold of its GPU model. The verdict reports the replica
    with the smallest margin; where all have enough, one whose GPU model has a baseline."""
    worst = min(candidate.replicas, key=limits.distance)
    why = incomparable(candidate, baseline)
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
            "spec.capacity.minKVTokens, or promote it by spec.rollout.promote"
        )
        return Verdict(GateResult.HELD, text, worst.tokens, blocked=True)
    return _enough(GateResult.PASSED, worst, limits, why)


def _enough(result: GateResult, replica: Measured, limits: Thresholds, why: str) -> Verdict:
    """A verdict with its figures; `why` says why the replica was not compared with a baseline."""
    limit = limits.of(replica.gpu)
    text = f"measured {replica.tokens} KV tokens, {limit.tokens} are required ({limit.source})"
    if not limit.tokens:
        text = f"measured {replica.tokens} KV tokens, none are required"
    if result is GateResult.REJECTED:
        text += f": {limit.tokens - replica.tokens} short"
    if why:
        text += f"; not compared: {why}"
    return Verdict(result, text, replica.tokens, limit.tokens, limit.baseline)
