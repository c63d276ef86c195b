"""Report: what was observed, as conditions. Pure; product sections 1 and 5.6 are its table.

All conditions are positive: True is good. Reasons are constants because reasons are API.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvline_contract.exits import MEANINGS, meaning
from kvline_contract.launch import Record
from kvline_contract.names import records_name
from kvline_contract.report import State
from kvline_operator.autoscale import Activity
from kvline_operator.candidate import IMAGE_REASONS, OOM_RESTARTS
from kvline_operator.gate import Outcome, Verdict
from kvline_operator.observe import Ended, PodView
from kvline_operator.records import DRIFT_PERCENT, drifted
from kvline_operator.rollout import RolloutPlan
from kvline_operator.spec import ServiceSpec
from kvline_operator.verdicts import Standing

# How far along a replica is; the furthest one speaks for the revision.
PROGRESS = [
    State.FAILED,
    State.LOADING,
    State.AUTOTUNING,
    State.PROBING,
    State.STRESSING,
    State.SHRUNK_RETRY,
    State.VALIDATING,
    State.VALIDATED,
]
READY_ORDER = (
    "Accepted",
    "Progressing",
    "ModelAvailable",
    "CapacityMeasured",
    "CapacitySufficient",
    "UpToDate",
)


@dataclass(frozen=True, slots=True)
class Condition:
    type: str
    status: str  # True, False, Unknown
    reason: str
    message: str = ""


@dataclass(frozen=True, slots=True)
class Scaling:
    """What the autoscaler says of itself, where there is one."""

    reason: Activity
    message: str
    replicas: int
    why: str  # of the last change


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything conditions are made of."""

    spec: ServiceSpec
    plan: RolloutPlan
    pods: tuple[PodView, ...]
    records: dict[str, Record] = field(default_factory=dict)  # by fingerprint
    apply_error: Condition | None = None  # an object of ours was refused
    deadline_exceeded: bool = False
    standing: Standing = field(default_factory=Standing)  # of the stable revision
    image_outdated: bool = False
    scaling: Scaling | None = None

    @property
    def newest(self) -> tuple[PodView, ...]:
        """Pods of the revision that the spec asks for."""
        wanted = self.plan.candidate or self.plan.stable
        return tuple(p for p in self.pods if p.revision == wanted)

    @property
    def stable(self) -> tuple[PodView, ...]:
        return tuple(p for p in self.pods if p.revision == self.plan.stable)

    @property
    def serving(self) -> tuple[PodView, ...]:
        """Ready replicas with a validated size, of the stable revision."""
        return tuple(p for p in self.stable if p.ready and p.validated)


def conditions(facts: Facts) -> list[Condition]:
    out = [
        accepted(facts),
        model_available(facts),
        capacity_measured(facts),
        capacity_sufficient(facts),
        capacity_stable(facts),
        progressing(facts),
        up_to_date(facts),
    ]
    if facts.scaling is not None:
        out.append(scaling_active(facts.scaling))
    return [*out, ready(facts, out)]


def accepted(facts: Facts) -> Condition:
    error = facts.apply_error
    if error is not None and error.type == "Accepted":
        return error
    ended = _failed_end(facts.newest)
    if ended is not None and meaning(ended.code).condition == "Accepted":
        return Condition("Accepted", "False", meaning(ended.code).reason, ended.message)
    return Condition("Accepted", "True", "Valid", "the spec can be acted on")


def model_available(facts: Facts) -> Condition:
    kind = "ModelAvailable"
    for pod in facts.newest:
        for ended in (pod.ended, pod.download_ended):
            if ended is not None and meaning(ended.code).condition == kind:
                return Condition(kind, "False", meaning(ended.code).reason, ended.message)
        if pod.waiting_reason == "CreateContainerConfigError":
            return Condition(kind, "False", "SecretMissing", pod.waiting_message)
    if any(p.downloading for p in facts.newest):
        return Condition(kind, "False", "Downloading", "the download step runs")
    if any(p.running or p.ended is not None for p in facts.newest):
        if facts.spec.inputs["model"].get("loadFormat") == "random":
            return Condition(kind, "True", "Random", "weights are random, from config.json alone")
        return Condition(kind, "True", "Available", facts.spec.source.text)
    return Condition(kind, "Unknown", "Pending", "no container has run yet")


def capacity_measured(facts: Facts) -> Condition:
    kind = "CapacityMeasured"
    if facts.spec.replicas == 0:
        return Condition(kind, "Unknown", "ScaledToZero", "no replica is asked for")
    pods = facts.stable or facts.newest
    measured = [p for p in pods if p.kv_tokens is not None]
    if measured:
        fewest = min(p.kv_tokens or 0 for p in measured)
        text = f"{fewest} KV tokens survived the stress at their final size on {measured[0].node}"
        return Condition(kind, "True", "Validated", text)
    failed = _failed_end(pods)
    if failed is not None and failed.code == 137:
        return Condition(kind, "False", _reason(failed, pods), _killed_message(failed, pods))
    if failed is not None and meaning(failed.code).condition == kind:
        return Condition(kind, "False", _reason(failed, pods), failed.message)
    return _measuring(kind, pods)


def _measuring(kind: str, pods: tuple[PodView, ...]) -> Condition:
    """No result and no failure: the stage of the replica furthest along."""
    reports = [p.report for p in pods if p.report is not None]
    if reports:
        report = max(reports, key=lambda r: PROGRESS.index(r.state))
        if report.failure is not None:
            reason = meaning(report.failure.code).reason or "EngineExited"
            return Condition(kind, "False", reason, report.failure.message)
        tried = [a.target_tokens for a in report.attempts if a.number]
        text = f"attempt {len(tried)} at {tried[-1]} tokens" if tried else "sizing"
        return Condition(kind, "False", str(report.state), text)
    running = [p for p in pods if p.running]
    if not running:
        return Condition(kind, "Unknown", "Pending", "no container runs yet")
    bad = next((p for p in running if p.report_invalid), None)
    if bad is not None:
        return Condition(kind, "Unknown", "ReportInvalid", f"{bad.name}: {bad.report_error}")
    text = running[0].report_error or "the sizing report has not been read yet"
    return Condition(kind, "Unknown", "ReportMissing", f"{running[0].name}: {text}")


def _failed_end(pods: tuple[PodView, ...]) -> Ended | None:
    """The last failed end of a replica that has not been validated since; it stands through
    restarts, so that a crash loop does not flap between Loading and its reason."""
    return next((pod.failed for pod in pods if pod.failed is not None), None)


def _reason(ended: Ended, pods: tuple[PodView, ...]) -> str:
    if ended.oom_killed:
        restarts = max(p.restarts for p in pods)
        return "ShrunkRetry" if restarts <= OOM_RESTARTS else "OutOfMemory"
    return (meaning(ended.code) if ended.code in MEANINGS else meaning(1)).reason


def _killed_message(ended: Ended, pods: tuple[PodView, ...]) -> str:
    restarts = max(p.restarts for p in pods)
    if ended.reason != "OOMKilled":
        return f"the container was killed (code 137), restart {restarts}"
    return (
        f"the container was killed at its memory limit while sizing, restart {restarts}; "
        "each start goes on from 95 % of the size that was killed"
    )


def capacity_sufficient(facts: Facts) -> Condition:
    kind, minimum = "CapacitySufficient", facts.spec.min_kv_tokens
    measured = [p.kv_tokens for p in facts.newest if p.kv_tokens is not None]
    if not measured:
        return Condition(kind, "Unknown", "Unknown", "no replica of this spec has a size yet")
    fewest = min(measured)
    if fewest < minimum:
        text = (
            f"measured {fewest} KV tokens, spec.capacity.minKVTokens asks for {minimum}: "
            f"{minimum - fewest} short; lower it, raise spec.resources.memory, or lower "
            "spec.engine.maxPrefillTokens or maxRunningRequests"
        )
        return Condition(kind, "False", "BelowMinimum", text)
    text = f"measured {fewest} KV tokens, at least {minimum} are asked for"
    return Condition(kind, "True", "Sufficient", text)


def capacity_stable(facts: Facts) -> Condition:
    """Whether replicas measure what identical ones measured before."""
    kind = "CapacityStable"
    known = 0
    for pod in facts.pods:
        result = pod.result
        record = facts.records.get(result.fingerprint) if result is not None else None
        if result is None or record is None:
            continue
        known += 1
        if drifted(record, result.kv_tokens):
            change = 100 * (result.kv_tokens - record.kv_tokens) / record.kv_tokens
            text = (
                f"{pod.name} measured {result.kv_tokens} KV tokens where an identical replica had "
                f"{record.kv_tokens} ({change:+.1f} %): something beside it takes memory, or gave "
                f"it back; delete ConfigMap {records_name(facts.spec.base)} to begin anew"
            )
            return Condition(kind, "False", "Drifted", text)
    if not known:
        return Condition(kind, "Unknown", "NoRecord", "no size of these replicas is on record")
    return Condition(kind, "True", "Stable", f"within {DRIFT_PERCENT} % of what is on record")


def progressing(facts: Facts) -> Condition:
    kind = "Progressing"
    error = facts.apply_error
    if error is not None and error.type == kind:
        return error
    for pod in facts.newest:
        if pod.unschedulable:
            return Condition(kind, "False", "Unschedulable", pod.unschedulable)
        if pod.waiting_reason in IMAGE_REASONS:
            text = f"{pod.waiting_reason}: {pod.waiting_message}"
            return Condition(kind, "False", "ImagePullFailed", text)
        if pod.ended is not None and meaning(pod.ended.code).condition == kind:
            return Condition(kind, "False", "DeviceFailure", pod.ended.message)
    if _is_complete(facts):
        return Condition(kind, "True", "Complete", "")
    if facts.deadline_exceeded:
        return Condition(kind, "False", "DeadlineExceeded", "no progress within the deadline")
    return Condition(kind, "True", "RollingOut", _counts(facts))


def _is_complete(facts: Facts) -> bool:
    ready = sum(1 for p in facts.newest if p.ready)
    return not facts.plan.candidate and ready >= facts.spec.replicas


def _counts(facts: Facts) -> str:
    ready = sum(1 for p in facts.newest if p.ready)
    return f"{ready} of {facts.spec.replicas} replicas are ready"


def up_to_date(facts: Facts) -> Condition:
    kind = "UpToDate"
    plan = facts.plan
    if plan.rejected and plan.gate is not None:
        text = f"revision {plan.rejected} was turned down, {plan.stable} serves: "
        return Condition(kind, "False", "RolledBack", text + plan.gate.message)
    if plan.candidate and plan.gate is not None:
        return _on_the_way(kind, facts, plan.gate)
    ready = sum(1 for p in facts.newest if p.ready)
    others = sum(1 for p in facts.pods if p.ready) - ready
    if others:
        text = f"revision {plan.stable} took over; {others} of another still to go"
        return Condition(kind, "False", "RollingOut", text)
    if ready == facts.spec.replicas == len(facts.newest):
        return Condition(kind, "True", "UpToDate", f"revision {facts.plan.stable}")
    return Condition(kind, "False", "Scaling", _counts(facts))


def _on_the_way(kind: str, facts: Facts, gate: Verdict) -> Condition:
    name = f"revision {facts.plan.candidate}"
    if facts.plan.paused:
        return Condition(kind, "False", "Paused", f"{name} waits: kvline.dev/paused is true")
    if gate.outcome is Outcome.PASS:
        return Condition(kind, "False", "RollingOut", f"{name} takes over: {_counts(facts)}")
    if gate.outcome is Outcome.FAIL:
        text = f"{name} is kept out of traffic, {facts.plan.stable} serves: {gate.message}"
        return Condition(kind, "False", "GateFailed", text)
    if gate.stuck:
        return Condition(kind, "False", "GateHeld", f"{name}: {gate.message}")
    text = f"{name} is measured before it takes traffic: {gate.message}"
    return Condition(kind, "False", "RollingOut", text)


def scaling_active(scaling: Scaling) -> Condition:
    known = scaling.reason is not Activity.UNKNOWN
    return Condition("ScalingActive", str(known), scaling.reason, scaling.message)


def ready(facts: Facts, others: list[Condition]) -> Condition:
    kind = "Ready"
    if facts.serving:
        tokens = sum(p.kv_tokens or 0 for p in facts.serving)
        many = len(facts.serving)
        text = f"{many} replicas serve" if many > 1 else "1 replica serves"
        return Condition(kind, "True", "Serving", f"{text} {tokens} KV tokens")
    if facts.spec.replicas == 0:
        return Condition(kind, "False", "ScaledToZero", "no replica is asked for")
    by_type = {c.type: c for c in others}
    for name in READY_ORDER:
        condition = by_type[name]
        if condition.status != "True":
            return Condition(kind, "False", condition.reason, condition.message)
    return Condition(kind, "False", "ReportMissing", "ready pods have no readable report")
