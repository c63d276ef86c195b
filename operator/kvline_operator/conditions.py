"""Report: what was observed, as conditions. Pure; product sections 1 and 5.6 are its table.

All conditions are positive: True is good. Reasons are constants because reasons are API.
"""

from __future__ import annotations

from kvline_contract.exits import meaning
from kvline_operator import capacity
from kvline_operator.autoscale import Activity
from kvline_operator.candidate import IMAGE_REASONS
from kvline_operator.ends import REFUSED, EndedPod
from kvline_operator.facts import Condition, Facts, Scaling, failed_end
from kvline_operator.gate import GateResult, Verdict
from kvline_operator.observe import PodView

READY_ORDER = (
    "Accepted",
    "Progressing",
    "ModelAvailable",
    "CapacityMeasured",
    "CapacitySufficient",
    "UpToDate",
)


def conditions(facts: Facts) -> list[Condition]:
    out = [
        accepted(facts),
        model_available(facts),
        capacity.measured(facts),
        capacity.sufficient(facts),
        capacity.stable(facts),
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
    ended = failed_end(facts.newest)
    if ended is not None and meaning(ended.code).condition == "Accepted":
        return Condition("Accepted", "False", meaning(ended.code).reason, ended.message)
    return Condition("Accepted", "True", "Valid", "the spec can be acted on")


def model_available(facts: Facts) -> Condition:
    kind = "ModelAvailable"
    if facts.preparing is not None and facts.preparing.condition == kind:
        return Condition(kind, "False", facts.preparing.reason, facts.preparing.message)
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


def progressing(facts: Facts) -> Condition:
    kind = "Progressing"
    error = facts.apply_error
    if error is not None and error.type == kind:
        return error
    if facts.preparing is not None and facts.preparing.condition == kind:
        return Condition(kind, "False", facts.preparing.reason, facts.preparing.message)
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
    if facts.refused:
        if "quota" in facts.refused:
            return Condition(kind, "False", "QuotaExceeded", facts.refused)
        return Condition(kind, "False", "PodsRefused", facts.refused)
    refused = _refused_device(facts)
    if refused is not None:
        return Condition(kind, "False", "DeviceFailure", refused.text)
    if facts.deadline_exceeded:
        return Condition(kind, "False", "DeadlineExceeded", "no progress within the deadline")
    return Condition(kind, "True", "RollingOut", _counts(facts))


def _is_complete(facts: Facts) -> bool:
    ready = sum(1 for p in facts.newest if p.ready)
    return not facts.plan.candidate and ready >= facts.spec.replicas


def _counts(facts: Facts) -> str:
    ready = sum(1 for p in facts.newest if p.ready)
    text = f"{ready} of {facts.spec.replicas} replicas are ready"
    ended = _ended_newest(facts)
    if ended:
        text += f"; ended by Kubernetes and replaced: {len(ended)}, the last one {ended[0].text}"
    return text


def _ended_newest(facts: Facts) -> list[EndedPod]:
    """Pods of the newest revision that ended for good, newest first."""
    wanted = facts.plan.candidate or facts.plan.stable
    return [p for p in facts.ended if p.revision == wanted]


def _refused_device(facts: Facts) -> EndedPod | None:
    """The last pod of the newest revision that its node could give no GPU, until a container of a
    younger one has run."""
    ran = max((p.created for p in facts.newest if p.running or p.ended or p.ready), default="")
    for pod in _ended_newest(facts) if facts.spec.gpus else ():
        if pod.reason == REFUSED and pod.created >= ran:
            return pod
    return None


def up_to_date(facts: Facts) -> Condition:
    kind = "UpToDate"
    plan = facts.plan
    if plan.rejected and plan.gate is not None:
        text = f"revision {plan.rejected} was rejected, {_who_serves(facts)}: {plan.gate.message}"
        return Condition(kind, "False", "RevisionRejected", text)
    if plan.candidate and plan.gate is not None:
        return _on_the_way(kind, facts, plan.gate)
    if facts.apply_error is not None and facts.apply_error.type == kind:
        return facts.apply_error
    ready = sum(1 for p in facts.newest if p.ready)
    others = sum(1 for p in facts.pods if p.ready) - ready
    if others:
        text = f"revision {plan.stable} took over; {others} of another still to go"
        return Condition(kind, "False", "RollingOut", text)
    if ready == facts.spec.replicas == len(facts.newest):
        return Condition(kind, "True", "UpToDate", f"revision {facts.plan.stable}")
    return Condition(kind, "False", "Scaling", _counts(facts))


def _who_serves(facts: Facts) -> str:
    """Never that the stable revision serves while it is only on its way back."""
    ready = {p.revision for p in facts.pods if p.ready}
    if facts.plan.stable in ready:
        return f"{facts.plan.stable} serves"
    others = " and ".join(sorted(ready))
    return f"{others} serves" if others else f"nothing serves until {facts.plan.stable} is back"


def _on_the_way(kind: str, facts: Facts, gate: Verdict) -> Condition:
    name = f"revision {facts.plan.candidate}"
    nothing = "" if any(p.ready for p in facts.pods) else "; nothing serves meanwhile"
    if facts.plan.paused:
        text = f"{name} waits: kvline.dev/paused is true{nothing}"
        return Condition(kind, "False", "Paused", text)
    if gate.result is GateResult.PASSED:
        text = f"{name} takes over: {_counts(facts)}{nothing}"
        return Condition(kind, "False", "RollingOut", text)
    if gate.result is GateResult.REJECTED:
        serves = "nothing serves" if nothing else _who_serves(facts)
        text = f"{name} is kept out of traffic, {serves}: {gate.message}"
        return Condition(kind, "False", "RevisionRejected", text)
    if gate.stuck:
        return Condition(kind, "False", "GateHeld", f"{name}: {gate.message}{nothing}")
    text = f"{name} is measured before it takes traffic: {gate.message}{nothing}"
    return Condition(kind, "False", "RollingOut", text)


def scaling_active(scaling: Scaling) -> Condition:
    known = scaling.reason is not Activity.UNKNOWN
    return Condition("ScalingActive", str(known), scaling.reason, scaling.message)


def _serve(pods: tuple[PodView, ...]) -> str:
    return f"{len(pods)} replicas serve" if len(pods) > 1 else "1 replica serves"


def ready(facts: Facts, others: list[Condition]) -> Condition:
    kind = "Ready"
    if facts.serving:
        tokens = sum(p.kv_tokens or 0 for p in facts.serving)
        return Condition(kind, "True", "Serving", f"{_serve(facts.serving)} {tokens} KV tokens")
    # Kubernetes finds them ready, so they have validated what an accepted revision was accepted
    # for. That this operator cannot read it, CapacityMeasured says.
    unread = tuple(p for p in facts.stable if p.ready)
    if unread and facts.standing.accepted:
        return Condition(kind, "True", "Serving", f"{_serve(unread)}; their reports cannot be read")
    if facts.spec.replicas == 0:
        return Condition(kind, "False", "ScaledToZero", "no replica is asked for")
    by_type = {c.type: c for c in others}
    # That time is over says least of all: what it waits for, such as a download, goes before.
    order = sorted(READY_ORDER, key=lambda name: by_type[name].reason == "DeadlineExceeded")
    for condition in (by_type[name] for name in order):
        if condition.status != "True":
            return Condition(kind, "False", condition.reason, condition.message)
    return Condition(kind, "False", "ReportMissing", "ready pods have no readable report")
