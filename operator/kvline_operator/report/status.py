"""The status of a service and the events for what has changed in it. Pure.

The previous status is only compared with, for transition times and events; no decision depends on
it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from kvline_contract.codec import encode
from kvline_contract.names import LABEL_SERVICE
from kvline_contract.report import MAX_WARNINGS, Termination
from kvline_operator.api.quantity import in_bytes
from kvline_operator.api.source import Download
from kvline_operator.api.spec import EARLIER_ACTS, Strategy
from kvline_operator.observe.ended_pods import EndedPod
from kvline_operator.observe.pods import PodView
from kvline_operator.plan.autoscale import Scaling
from kvline_operator.plan.threshold import Thresholds
from kvline_operator.report.conditions import conditions
from kvline_operator.report.effective import effective
from kvline_operator.report.estimates import what_if
from kvline_operator.report.kstatus import TYPES, abnormal
from kvline_operator.report.service_state import Condition, ServiceState
from kvline_operator.store.capacity_status import CapacityStatus, capacity
from kvline_operator.store.verdict import GateResult

Object = dict[str, Any]
MAX_REPLICA_SIZING = 16
MAX_ENDED_EVENTS = 3  # in one reconcile

REJECTED = "RevisionRejected"  # reason of UpToDate, and of its event
# Conditions (type and reason) that are also reported as an event: its reason and type.
EVENTS = {
    ("CapacityMeasured", "Validated"): ("CapacityValidated", "Normal"),
    ("CapacityMeasured", "ShrunkRetry"): ("CapacityShrunk", "Warning"),
    ("CapacityMeasured", "OutOfMemory"): ("OutOfMemory", "Warning"),
    ("CapacityMeasured", "ContextDoesNotFit"): ("ContextDoesNotFit", "Warning"),
    ("CapacityMeasured", "StepTooLong"): ("StepTooLong", "Warning"),
    ("CapacityMeasured", "EngineExited"): ("EngineExited", "Warning"),
    ("CapacityMeasured", "Killed"): ("Killed", "Warning"),
    ("CapacityMeasured", "ReportInvalid"): ("ReportInvalid", "Warning"),
    ("CapacitySufficient", "BelowMinimum"): ("BelowMinimum", "Warning"),
    ("CapacityStable", "Drifted"): ("Drifted", "Warning"),
    ("CapacityStable", "BelowBaseline"): ("BelowBaseline", "Warning"),
    ("Accepted", "SpecInvalid"): ("SpecInvalid", "Warning"),
    ("Accepted", "NameConflict"): ("NameConflict", "Warning"),
    ("Accepted", "NewerState"): ("NewerState", "Warning"),
    ("Accepted", "Forbidden"): ("Forbidden", "Warning"),
    ("ModelAvailable", "NotFound"): ("ModelNotFound", "Warning"),
    ("ModelAvailable", "Invalid"): ("ModelInvalid", "Warning"),
    ("ModelAvailable", "Unsupported"): ("ModelUnsupported", "Warning"),
    ("ModelAvailable", "DownloadFailed"): ("DownloadFailed", "Warning"),
    ("ModelAvailable", "CheckFailed"): ("CheckFailed", "Warning"),
    ("ModelAvailable", "SecretMissing"): ("SecretMissing", "Warning"),
    ("ModelAvailable", "ClaimMissing"): ("ClaimMissing", "Warning"),
    ("ModelAvailable", "ClaimPending"): ("ClaimPending", "Warning"),
    ("Progressing", "Unschedulable"): ("Unschedulable", "Warning"),
    ("Progressing", "SchedulingGated"): ("SchedulingGated", "Warning"),
    ("Progressing", "PodNotSetUp"): ("PodNotSetUp", "Warning"),
    ("Progressing", "NodeNotReady"): ("NodeNotReady", "Warning"),
    ("Progressing", "ImagePullFailed"): ("ImagePullFailed", "Warning"),
    ("Progressing", "ContainerNotStarted"): ("ContainerNotStarted", "Warning"),
    ("Progressing", "QuotaExceeded"): ("QuotaExceeded", "Warning"),
    ("Progressing", "LimitRangeViolated"): ("LimitRangeViolated", "Warning"),
    ("Progressing", "PodSecurityViolated"): ("PodSecurityViolated", "Warning"),
    ("Progressing", "AdmissionDenied"): ("AdmissionDenied", "Warning"),
    ("Progressing", "WebhookUnavailable"): ("WebhookUnavailable", "Warning"),
    ("Progressing", "InternalError"): ("InternalError", "Warning"),
    ("Progressing", "PodsRefused"): ("PodsRefused", "Warning"),
    ("Progressing", "DeadlineExceeded"): ("DeadlineExceeded", "Warning"),
    ("Progressing", "DeviceFailure"): ("DeviceFailure", "Warning"),
    ("Progressing", "RankLost"): ("RankLost", "Warning"),
    ("Progressing", "NoProgress"): ("NoProgress", "Warning"),
    ("UpToDate", "GateHeld"): ("GateHeld", "Warning"),
    ("UpToDate", "PromotionRefused"): ("PromotionRefused", "Warning"),
    ("UpToDate", "ForeignChange"): ("ForeignChange", "Warning"),
    ("Ready", "Serving"): ("Serving", "Normal"),
}


@dataclass(frozen=True, slots=True)
class Event:
    reason: str
    kind: str  # Normal or Warning
    message: str


def build(state: ServiceState, previous: Object, now: str) -> tuple[Object, list[Event]]:
    """The new status, and an event for each change that EVENTS lists."""
    made = conditions(state)
    made += abnormal(made)
    ready = sum(1 for p in state.pods if p.ready)
    out: Object = {
        "conditions": [_stamp(c, previous, state.spec.generation, now) for c in made],
        "observedGeneration": state.spec.generation,
        "model": state.served_name,
        "replicas": len(state.pods),
        "readyReplicas": ready,
        "ready": f"{ready}/{state.spec.replicas}",
        "reason": _reason(made),
        "endedPods": len(state.ended),
        "selector": f"{LABEL_SERVICE}={state.spec.base}",
        "url": state.url,
        "rollout": _rollout(state, previous.get("rollout") or {}, now),
        "effective": effective(state),
        "replicaSizing": replica_sizing(state),
    }
    figures = _capacity(state)
    own = spec_warnings(state)
    theirs = warnings(state)[: MAX_WARNINGS - len(own)]
    more = {"capacity": figures, "warnings": own + theirs, "diagnosis": diagnosis(state)}
    out |= {key: value for key, value in more.items() if value}
    known = previous.get("warnings") or []
    events = [Event("SpecWarning", "Warning", text) for text in own if text not in known]
    events += [Event("ReplicaWarning", "Warning", text) for text in theirs if text not in known]
    events += _ended_events(state.ended, previous.get("endedPods") or 0)
    events += [Event("ContainerEnded", "Warning", _container_end(p)) for p in state.newly_ended]
    if state.plan.gate is not None:
        events += _gate_events(made, out["rollout"], previous)
    if state.scaling is not None:
        out["desiredReplicas"] = state.scaling.replicas
        events += _scale_events(state.scaling, previous.get("desiredReplicas"))
    return out, [*events, *_condition_events(made, previous)]


def refused(wrong: Condition, body: Object, now: str) -> tuple[Object, list[Event]]:
    """The status of a service of which nothing could be planned, such as of a spec that cannot be
    parsed: Ready stays True if it was, the rest is kept."""
    previous = body.get("status") or {}
    generation = body["metadata"].get("generation", 0)
    made_anew = (wrong.type, "Ready", *TYPES)
    kept = [c for c in previous.get("conditions") or [] if c.get("type") not in made_anew]
    was_ready = _recorded(previous, "Ready").get("status") == "True"
    ready = Condition("Ready", "False", wrong.reason, wrong.message)
    moves = Condition("Reconciling", "True", wrong.reason, wrong.message)
    made = [wrong, *([] if was_ready else [ready]), *(abnormal([wrong]) or [moves])]
    stamped = [_stamp(c, previous, generation, now) for c in made]
    if was_ready:
        kept.append(_recorded(previous, "Ready"))
    status = {**previous, "conditions": [*stamped, *kept], "observedGeneration": generation}
    status["reason"] = wrong.reason
    return status, _condition_events(made, previous)


def _capacity(state: ServiceState) -> Object:
    now, kept = CapacityStatus.of(p.report for p in state.described), state.stable_state.capacity
    if now is not None:
        now = replace(now, kv_tokens_total=sum(p.kv_tokens or 0 for p in state.serving))
    serving = bool(state.serving) or any(p.ready for p in state.stable)
    return capacity(now, kept, serving) | what_if(now or kept, state)


def _reason(made: list[Condition]) -> str:
    """What a list of services shows: why one is not ready, or else why its spec is not served."""
    kinds = ("Accepted", "Ready", "UpToDate")
    accepted, ready, current = (next(c for c in made if c.type == kind) for kind in kinds)
    if accepted.status == "False":
        return accepted.reason
    return current.reason if ready.status == "True" != current.status else ready.reason


def _rollout(state: ServiceState, previous: Object, now: str) -> Object:
    plan = state.plan
    out: Object = {"stableRevision": state.accepted, "imageOutdated": state.image_outdated}
    if plan.newest != state.accepted:
        out["candidateRevision"] = plan.newest
    if plan.rejected:
        out["rejectedRevision"] = plan.rejected
    gate = _gate(state)
    if gate:
        before = dict(previous.get("gate") or {})
        since = before.pop("time", now)
        out["gate"] = {**gate, "time": since if before == gate else now}
    return out


def _gate(state: ServiceState) -> Object:
    """The verdict on the candidate or the rejected revision, else on the stable one."""
    plan = state.plan
    past = state.stable_state.verdict
    verdict = plan.gate or (past.verdict() if past is not None else None)
    if verdict is None:
        return {}
    revision = plan.candidate or plan.rejected or plan.stable
    out: Object = {"revision": revision, "result": str(verdict.result)}
    for name in ("measured", "required", "baseline"):
        if getattr(verdict, name):
            out[name] = getattr(verdict, name)
    if verdict.sequences is not None:
        out["sequences"] = {k: n for k, n in encode(verdict.sequences).items() if n}
    return {**out, "message": verdict.message[:1024]}


def _gate_events(made: list[Condition], rollout: Object, previous: Object) -> list[Event]:
    """GatePassed or RevisionRejected, once for each revision."""
    gate, before = rollout["gate"], previous.get("rollout") or {}
    old = before.get("gate") or {}
    same = all(gate[key] == old.get(key) for key in ("revision", "result"))
    out = []
    if gate["result"] == GateResult.PASSED and not same:
        out += [Event("GatePassed", "Normal", f"revision {gate['revision']}: {gate['message']}")]
    known = _recorded(previous, "UpToDate").get("reason") == REJECTED
    if not known or _newest(rollout) != _newest(before):
        rejected = [c for c in made if (c.type, c.reason) == ("UpToDate", REJECTED)]
        out += [Event(REJECTED, "Warning", c.message) for c in rejected]
    return out


def _newest(rollout: Object) -> str:
    """The revision of the spec, where it is not stable."""
    return str(rollout.get("rejectedRevision") or rollout.get("candidateRevision") or "")


def _ended_events(pods: tuple[EndedPod, ...], before: int) -> list[Event]:
    """PodEnded for new terminal pods, which no condition of a healthy service shows. Only for the
    newest, because a broken node ends many."""
    new = min(MAX_ENDED_EVENTS, max(0, len(pods) - before))
    return [
        Event("PodEnded", "Warning", f"{p.text}; it no longer counts as a replica")
        for p in pods[:new]
    ]


def _container_end(pod: PodView) -> str:
    """With its number, so that a second end that is the same is an event of its own. In short: the
    memory by part is in conditions and status.diagnosis, and would bury the events between."""
    assert pod.ended is not None
    ended, which = pod.ended, f"{pod.name} on {pod.node}: end {pod.end_number} of its container"
    if ended.from_outside:
        return f"{which}: {ended.killed_text}"
    return f"{which}, with code {ended.code} ({ended.title}): {ended.headline}"


def _scale_events(scaling: Scaling, before: int | None) -> list[Event]:
    if before in (None, scaling.replicas):
        return []
    return [Event("Scaled", "Normal", f"from {before} to {scaling.replicas}: {scaling.why}")]


def warnings(state: ServiceState) -> list[str]:
    """Warnings of the replicas' sizing reports, such as slower kernels, without duplicates; then of
    pods that have another memory limit than their template."""
    found = {text for p in state.pods if p.report is not None for text in p.report.warnings}
    return sorted(found) + sorted(filter(None, (_other_limit(p, state) for p in state.pods)))


def _other_limit(pod: PodView, state: ServiceState) -> str:
    wanted = state.memory_limits.get(pod.revision, "")
    if not wanted or pod.memory == wanted:
        return ""
    if pod.memory and in_bytes(pod.memory, "") == in_bytes(wanted, ""):
        return ""
    limit = f"a memory limit of {pod.memory}" if pod.memory else "no memory limit"
    return (
        f"pod {pod.name} has {limit}, its revision {wanted}: changed at admission, or by a resize"
    )


def spec_warnings(state: ServiceState) -> list[str]:
    """What a spec may ask for, but not without a word."""
    found: list[str] = []
    spec, access = state.spec, state.inputs.get("access", {})
    if "apiKeySecretRef" in access and "tlsSecretRef" not in access:
        found.append(
            "spec.access.apiKeySecretRef without tlsSecretRef: the API port is plain HTTP, so "
            "clients send the key in clear text unless a mesh or an ingress encrypts the way to "
            "the pods"
        )
    if spec.source.download is Download.POD and spec.rollout.strategy is Strategy.RECREATE:
        found.append(
            "spec.rollout.strategy Recreate without spec.model.cache: nothing serves while a new "
            "revision downloads its model"
        )
    for name in spec.earlier_acts:
        found.append(f"annotation {name} has no effect: use {EARLIER_ACTS[name]}, and remove it")
    return found


def diagnosis(state: ServiceState) -> Object:
    """status.diagnosis: the termination message of a failed engine of the spec's revision; after
    that was rejected and its pods deleted, the stored one."""
    failure = next((f for p in state.newest if (f := _failure(p)) is not None), None)
    revision = state.plan.newest
    if failure is None and state.plan.rejected and state.plan.gate is not None:
        failure, revision = state.plan.gate.diagnosis, state.plan.rejected
    if failure is None:
        return {}
    found = encode(failure)
    kept = ("code", "name", "message", "binding", "largestMaxModelLen", "knobs")
    return {"revision": revision, **{key: found[key] for key in kept if key in found}}


def _failure(pod: PodView) -> Termination | None:
    if pod.ended is not None and pod.failed is not None:
        return pod.failed.termination
    return pod.report.failure if pod.report is not None else None


def replica_sizing(state: ServiceState) -> list[Object]:
    """At most 16 replicas: those that are not ready first, then by tokens."""
    ordered = sorted(state.pods, key=lambda p: (p.ready, p.kv_tokens or 0, p.name))
    minimums = Thresholds.minimums(state.spec.min_kv_tokens, state.spec.min_sequences)
    out = []
    for pod in ordered[:MAX_REPLICA_SIZING]:
        item: Object = {"pod": pod.name, "state": replica_state(pod, minimums)}
        if pod.node:
            item["node"] = pod.node
        if pod.kv_tokens is not None and pod.report is not None:
            item["kvTokens"] = pod.kv_tokens
            if pod.result is not None and pod.result.state_slots is not None:
                item["sequences"] = pod.result.state_slots
            item["attempts"] = max([1, *(a.number for a in pod.report.attempts)])
        out.append(item)
    return out


def replica_state(pod: PodView, minimums: Thresholds) -> str:
    if pod.ready:
        return "Ready"
    if pod.measured is not None:
        return "BelowMinimum" if minimums.short(pod.measured) else "GateClosed"
    if pod.report is not None:
        return str(pod.report.state)
    return "Unreachable" if pod.running and pod.report_error else "Pending"


def _condition_events(made: list[Condition], previous: Object) -> list[Event]:
    out = []
    for condition in made:
        before = _recorded(previous, condition.type)
        changed = (before.get("status"), before.get("reason")) != (
            condition.status,
            condition.reason,
        )
        named = EVENTS.get((condition.type, condition.reason))
        if changed and named is not None:
            out.append(Event(named[0], named[1], condition.message))
    return out


def _recorded(status: Object, kind: str) -> Object:
    """The condition of this type; empty where there is none."""
    return next((c for c in status.get("conditions") or [] if c.get("type") == kind), {})


def _stamp(condition: Condition, previous: Object, generation: int, now: str) -> Object:
    before = _recorded(previous, condition.type)
    since = before.get("lastTransitionTime") if before.get("status") == condition.status else None
    return {
        "type": condition.type,
        "status": condition.status,
        "reason": condition.reason,
        "message": condition.message[:2048],
        "lastTransitionTime": since or now,
        "observedGeneration": generation,
    }
