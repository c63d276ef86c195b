"""Report: the whole status of a service from what was observed, and the events it calls for.

Pure. The status in the cluster is compared with, for transition times and for «unchanged», but
nothing of it becomes an input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvline_contract.codec import encode
from kvline_contract.names import API_PORT, LABEL_SERVICE
from kvline_contract.report import Result, SizingReport
from kvline_operator.conditions import Condition, Facts, Scaling, conditions
from kvline_operator.observe import PodView, condition_of

Object = dict[str, Any]
MAX_REPLICA_SIZING = 16

# Conditions whose news is worth an event, and what the event is called.
EVENTS = {
    ("CapacityMeasured", "Validated"): ("CapacityValidated", "Normal"),
    ("CapacityMeasured", "ShrunkRetry"): ("CapacityShrunk", "Warning"),
    ("CapacityMeasured", "OutOfMemory"): ("OutOfMemory", "Warning"),
    ("CapacityMeasured", "ContextDoesNotFit"): ("ContextDoesNotFit", "Warning"),
    ("CapacityMeasured", "EngineExited"): ("EngineExited", "Warning"),
    ("CapacityMeasured", "ReportInvalid"): ("ReportInvalid", "Warning"),
    ("CapacitySufficient", "BelowMinimum"): ("BelowMinimum", "Warning"),
    ("CapacityStable", "Drifted"): ("Drifted", "Warning"),
    ("Accepted", "SpecInvalid"): ("SpecInvalid", "Warning"),
    ("Accepted", "NameConflict"): ("NameConflict", "Warning"),
    ("Accepted", "Forbidden"): ("Forbidden", "Warning"),
    ("ModelAvailable", "NotFound"): ("ModelNotFound", "Warning"),
    ("ModelAvailable", "Invalid"): ("ModelInvalid", "Warning"),
    ("ModelAvailable", "Unsupported"): ("ModelUnsupported", "Warning"),
    ("ModelAvailable", "DownloadFailed"): ("DownloadFailed", "Warning"),
    ("ModelAvailable", "SecretMissing"): ("SecretMissing", "Warning"),
    ("Progressing", "Unschedulable"): ("Unschedulable", "Warning"),
    ("Progressing", "ImagePullFailed"): ("ImagePullFailed", "Warning"),
    ("Progressing", "QuotaExceeded"): ("QuotaExceeded", "Warning"),
    ("Progressing", "DeadlineExceeded"): ("DeadlineExceeded", "Warning"),
    ("Progressing", "DeviceFailure"): ("DeviceFailure", "Warning"),
    ("UpToDate", "GateHeld"): ("GateHeld", "Warning"),
    ("UpToDate", "RolledBack"): ("RolledBack", "Warning"),
    ("Ready", "Serving"): ("Serving", "Normal"),
}


@dataclass(frozen=True, slots=True)
class Event:
    reason: str
    kind: str  # Normal or Warning
    message: str


def build(facts: Facts, previous: Object, now: str) -> tuple[Object, list[Event]]:
    """The new status, and one event for each condition that changed its mind."""
    made = conditions(facts)
    out: Object = {
        "conditions": [_stamp(c, previous, facts.spec.generation, now) for c in made],
        "observedGeneration": facts.spec.generation,
        "model": facts.spec.served_name,
        "replicas": len(facts.pods),
        "readyReplicas": sum(1 for p in facts.pods if p.ready),
        "selector": f"{LABEL_SERVICE}={facts.spec.base}",
        "url": f"http://{facts.spec.base}.{facts.spec.namespace}.svc:{API_PORT}/v1",
        "rollout": _rollout(facts, previous.get("rollout") or {}, now),
        "replicaSizing": replica_sizing(facts),
    }
    figures = capacity(facts.serving)
    if figures:
        out["capacity"] = figures
    news = []
    if facts.plan.gate is not None:
        news += _gate_events(out["rollout"], previous.get("rollout") or {})
    if facts.scaling is not None:
        out["desiredReplicas"] = facts.scaling.replicas
        news += _scale_events(facts.scaling, previous.get("desiredReplicas"))
    return out, [*news, *events(made, previous)]


def refused(spec_error: Condition, body: Object, now: str) -> tuple[Object, list[Event]]:
    """The status of a spec that cannot be parsed: what serves goes on, the rest stays as it was."""
    previous = body.get("status") or {}
    generation = body["metadata"].get("generation", 0)
    kept = [
        c for c in previous.get("conditions") or [] if c.get("type") not in ("Accepted", "Ready")
    ]
    was_ready = condition_of(previous, "Ready").get("status") == "True"
    ready = Condition("Ready", "False", spec_error.reason, spec_error.message)
    made = [spec_error, *([] if was_ready else [ready])]
    stamped = [_stamp(c, previous, generation, now) for c in made]
    if was_ready:
        kept.append(condition_of(previous, "Ready"))
    status = {**previous, "conditions": [*stamped, *kept], "observedGeneration": generation}
    return status, events(made, previous)


def _rollout(facts: Facts, previous: Object, now: str) -> Object:
    plan = facts.plan
    out: Object = {"stableRevision": plan.stable, "imageOutdated": facts.image_outdated}
    if plan.candidate:
        out["candidateRevision"] = plan.candidate
    if plan.rejected:
        out["rejectedRevision"] = plan.rejected
    gate = _gate(facts)
    if gate:
        before = dict(previous.get("gate") or {})
        since = before.pop("time", now)
        out["gate"] = {**gate, "time": since if before == gate else now}
    return out


def _gate(facts: Facts) -> Object:
    """The verdict of what is on its way or was turned down, else of the revision that serves."""
    plan = facts.plan
    verdict = plan.gate or facts.standing.last_verdict()
    if verdict is None:
        return {}
    revision = plan.candidate or plan.rejected or plan.stable
    out: Object = {"revision": revision, "result": str(verdict.outcome)}
    for name in ("measured", "required", "baseline"):
        if getattr(verdict, name):
            out[name] = getattr(verdict, name)
    return {**out, "message": verdict.message[:1024]}


def _gate_events(rollout: Object, previous: Object) -> list[Event]:
    """Passed or failed is told once a revision, with the figures."""
    gate, before = rollout.get("gate") or {}, previous.get("gate") or {}
    named = {"Pass": ("GatePassed", "Normal"), "Fail": ("GateFailed", "Warning")}
    kind = named.get(gate.get("result", ""))
    same = [gate.get(k) == before.get(k) for k in ("revision", "result")]
    if kind is None or all(same):
        return []
    return [Event(kind[0], kind[1], f"revision {gate['revision']}: {gate['message']}")]


def _scale_events(scaling: Scaling, before: int | None) -> list[Event]:
    if before in (None, scaling.replicas):
        return []
    return [Event("Scaled", "Normal", f"from {before} to {scaling.replicas}: {scaling.why}")]


def capacity(serving: tuple[PodView, ...]) -> Object:
    """The figures to plan with: of the ready replica with the fewest tokens."""
    sized = [(p.report, p.report.result) for p in serving if p.report and p.report.result]
    if not sized:
        return {}
    report, result = min(sized, key=lambda pair: pair[1].kv_tokens)
    tokens = [r.kv_tokens for _, r in sized]
    out = {
        "kvTokens": min(tokens),
        "kvTokensTotal": sum(tokens),
        "spread": {"min": min(tokens), "max": max(tokens)},
        **_figures(report, result),
    }
    if report.effective is not None:
        out["fullLengthSequences"] = min(tokens) // max(1, report.effective.max_model_len)
    return out


def _figures(report: SizingReport, result: Result) -> Object:
    out = {
        "bytesPerToken": result.bytes_per_token,
        "memory": encode(result.memory),
        "attempts": max([1, *(a.number for a in report.attempts)]),
        "measuredAt": result.measured_at,
        "source": str(result.source),
        "fingerprint": result.fingerprint,
    }
    if report.provenance is not None:
        out["provenance"] = encode(report.provenance)
    return out


def replica_sizing(facts: Facts) -> list[Object]:
    """At most 16 replicas, worst first: those without a size, then by tokens."""
    ordered = sorted(facts.pods, key=lambda p: (p.ready, p.kv_tokens or 0, p.name))
    out = []
    for pod in ordered[:MAX_REPLICA_SIZING]:
        item: Object = {"pod": pod.name, "state": replica_state(pod, facts.spec.min_kv_tokens)}
        if pod.node:
            item["node"] = pod.node
        if pod.kv_tokens is not None and pod.report is not None:
            item["kvTokens"] = pod.kv_tokens
            item["attempts"] = max([1, *(a.number for a in pod.report.attempts)])
        out.append(item)
    return out


def replica_state(pod: PodView, minimum: int) -> str:
    if pod.ready:
        return "Ready"
    if pod.kv_tokens is not None:
        return "BelowMinimum" if pod.kv_tokens < minimum else "GateClosed"
    if pod.report is not None:
        return str(pod.report.state)
    return "Unreachable" if pod.running and pod.report_error else "Pending"


def events(made: list[Condition], previous: Object) -> list[Event]:
    out = []
    for condition in made:
        before = condition_of(previous, condition.type)
        changed = (before.get("status"), before.get("reason")) != (
            condition.status,
            condition.reason,
        )
        named = EVENTS.get((condition.type, condition.reason))
        if changed and named is not None:
            out.append(Event(named[0], named[1], condition.message))
    return out


def _stamp(condition: Condition, previous: Object, generation: int, now: str) -> Object:
    before = condition_of(previous, condition.type)
    since = before.get("lastTransitionTime") if before.get("status") == condition.status else None
    return {
        "type": condition.type,
        "status": condition.status,
        "reason": condition.reason,
        "message": condition.message[:2048],
        "lastTransitionTime": since or now,
        "observedGeneration": generation,
    }
