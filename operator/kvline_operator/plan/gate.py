"""The gate, which decides whether a candidate may take traffic. Pure.

Only a measured shortfall or a failed engine rejects a candidate. Anything else that prevents a
measurement holds it; without a sizing report nothing passes. See docs/operations.md, Rollouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvline_contract.counts import counted
from kvline_contract.launch import KVCacheDtype, StateDtype
from kvline_contract.report import Termination
from kvline_operator.observe.pods import Measured
from kvline_operator.observe.slots import Slots
from kvline_operator.plan.threshold import SEQUENCES, TOKENS, Thresholds, device
from kvline_operator.plan.trade import Asked, Trade
from kvline_operator.store.verdict import GateResult, Sequences, Verdict


@dataclass(frozen=True, slots=True)
class ComparisonGroup:
    """KV tokens of two replicas are compared only where these are equal."""

    model: str  # source without the commit
    gpus: int  # per replica
    ranks: int = 1  # per replica: one on each GPU, or all on the CPU
    kv_cache_dtype: str = KVCacheDtype.AUTO  # a stored one may be of a newer operator
    state_dtype: str = StateDtype.FLOAT32  # so may this; it is nothing to a model without states

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
    # By GPU model, where layers keep recurrent states
    slots: Mapping[str, Slots] = field(default_factory=dict)
    asked: Asked = field(default_factory=Asked)
    # MiB of the stable revision's encoder of images, by part; None: nothing is stored of it
    encoder: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    group: ComparisonGroup
    replicas: tuple[Measured, ...]
    failure: str = ""  # why its engine failed, where that rejects the revision
    diagnosis: Termination | None = None  # the engine's termination message
    blocker: str = ""  # what else prevents the measurement
    stage: str = ""  # progress, where nothing does
    promoted: bool = False
    asked: Asked = field(default_factory=Asked)

    def slots(self, gpu: str) -> Slots | None:
        """Of the measured replica with the fewest on this GPU model."""
        found = [r.slots for r in self.replicas if r.gpu == gpu and r.slots is not None]
        return min(found, key=lambda slots: slots.sequences) if found else None


def evaluate(candidate: Candidate, baseline: Baseline, policy: Thresholds) -> Verdict:
    """The verdict on a candidate; `policy` has the thresholds of the current spec."""
    measured = min((r.tokens for r in candidate.replicas), default=0)
    if candidate.promoted:
        text = "promoted by hand: measured against the minimums of spec.capacity alone"
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
    """The KV tokens and sequences that each replica of a candidate must have: what the baseline
    has, but for what the spec itself trades."""
    if candidate.promoted or incomparable(candidate, baseline):
        return Thresholds.minimums(policy.minimum, policy.min_sequences)
    # A pinned size does not grow by the memory that fewer slots leave.
    pinned, traded = candidate.asked.pinned, trades(candidate, baseline)
    costs = {gpu: max(0, t.tokens) if pinned else t.tokens for gpu, t in traded.items()}
    tokens = {gpu: max(1, best - costs.get(gpu, 0)) for gpu, best in baseline.tokens.items()}
    kept = candidate.asked.requests == baseline.asked.requests
    sequences = {gpu: slots.sequences for gpu, slots in baseline.slots.items() if kept}
    why = "" if kept or not baseline.slots else "as the spec changed maxRunningRequests"
    return replace(policy, baseline=tokens, sequences=sequences, given_up=why)


def trades(candidate: Candidate, baseline: Baseline) -> dict[str, Trade]:
    """What the spec asks for, by GPU model: of a replica as measured, before that as expected."""
    old, new = baseline.asked, candidate.asked
    return {
        gpu: Trade.of(
            before,
            candidate.slots(gpu) or new.expected(before),
            old,
            new,
            baseline.bytes_per_token,
        )
        for gpu, before in baseline.slots.items()
    }


def incomparable(candidate: Candidate, baseline: Baseline) -> str:
    """Why the two cannot be compared; empty where they can."""
    if candidate.group.model != baseline.group.model:
        return f"{candidate.group.model} is another model than {baseline.group.model}"
    new, old = candidate.group.kv_cache_dtype, baseline.group.kv_cache_dtype
    if new != old:
        return f"spec.engine.kvCacheDtype is {new}, not {old}: tokens of another size"
    new, old = candidate.group.state_dtype, baseline.group.state_dtype
    if new != old:
        return f"spec.engine.stateDtype is {new}, not {old}: recurrent states of another precision"
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
    """Compares each replica with the thresholds of its GPU model. The verdict reports the replica
    with the smallest margin; where all have enough, one whose GPU model has a baseline."""
    worst = min(candidate.replicas, key=limits.distance)
    why = incomparable(candidate, baseline)
    unknown = None if why else next((r for r in candidate.replicas if limits.unknown(r.gpu)), None)
    if limits.short(worst):
        return _judged(GateResult.REJECTED, candidate, baseline, worst, limits, why)
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
    return _judged(GateResult.PASSED, candidate, baseline, worst, limits, why)


def _judged(
    result: GateResult,
    candidate: Candidate,
    baseline: Baseline,
    replica: Measured,
    limits: Thresholds,
    why: str,
) -> Verdict:
    """A verdict with its figures; `why` says why the replica was not compared with a baseline."""
    found = {each.unit: each for each in limits.judged(replica)}
    tokens, sequences = found[TOKENS], found.get(SEQUENCES)
    text = "measured " + "; ".join(each.text() for each in found.values())
    if why:
        text += f"; not compared: {why}"
    else:
        text += _of_slots(candidate, baseline, replica, limits)
    if result is GateResult.REJECTED:
        text += _of_encoder(baseline, replica)
    counts = None
    if sequences is not None:
        asked = sequences.limit
        counts = Sequences(sequences.measured, asked.least, asked.baseline)
    measured, limit = tokens.measured, tokens.limit
    return Verdict(result, text, measured, limit.least, limit.baseline, sequences=counts)


def _of_slots(
    candidate: Candidate, baseline: Baseline, replica: Measured, limits: Thresholds
) -> str:
    """What the spec trades, or why sequences were not compared."""
    trade = trades(candidate, baseline).get(replica.gpu)
    if trade is not None and replica.slots is not None and trade.text:
        return f"; {trade.text}"
    before = baseline.slots.get(replica.gpu)
    if replica.slots is None and (before is not None or limits.min_sequences):
        return "; sequences are not bounded: no layer of it keeps a recurrent state"
    if replica.slots is not None and before is None and baseline.tokens:
        return "; sequences are not compared: the baseline has none"
    return ""


def _of_encoder(baseline: Baseline, replica: Measured) -> str:
    """The memory that an encoder of images takes and did not before, and what takes less."""
    if baseline.encoder is None:
        return ""
    before = baseline.encoder
    more = {name: mib - before.get(name, 0) for name, mib in replica.encoder.items()}
    taken = {name: mib for name, mib in more.items() if mib > 0}
    if not taken:
        return ""
    named = ", ".join(f"{name} {mib}" for name, mib in taken.items())
    text = f"; images take {sum(taken.values())} MiB more than before ({named}): "
    text += "" if before else "set spec.engine.modalities to [text], or "
    return text + "lower spec.engine.maxImagePatches or maxImagesPerRequest"
