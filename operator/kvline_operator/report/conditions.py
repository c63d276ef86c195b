"""The conditions of a service. Pure; docs/operations.md lists types and reasons.

All have positive polarity: True is good. Reasons are part of the API.
"""

from __future__ import annotations

from kvline_contract.exits import meaning
from kvline_operator.observe.ended_pods import REFUSED, EndedPod
from kvline_operator.observe.pods import PodView
from kvline_operator.plan.autoscale import Activity, Scaling
from kvline_operator.plan.candidate import IMAGE_REASONS, waiting
from kvline_operator.report import capacity
from kvline_operator.report.service_state import Condition, ServiceState, failed_end
from kvline_operator.store.verdict import GateResult, Verdict

READY_ORDER = (
    "Accepted",
    "Progressing",
    "ModelAvailable",
    "CapacityMeasured",
    "CapacitySufficient",
    "UpToDate",
)


def conditions(state: ServiceState) -> list[Condition]:
    out = [
        accepted(state),
        model_available(state),
        capacity.measured(state),
        capacity.sufficient(state),
        capacity.stable(state),
        progressing(state),
        up_to_date(state),
    ]
    if state.scaling is not None:
        out.append(scaling_active(state.scaling))
    return [*out, ready(state, out)]


def accepted(state: ServiceState) -> Condition:
    error = state.apply_error
    if error is not None and error.type == "Accepted":
        return error
    ended = failed_end(state.newest)
    if ended is not None and meaning(ended.code).condition == "Accepted":
        return Condition("Accepted", "False", meaning(ended.code).reason, ended.message)
    return Condition("Accepted", "True", "Valid", "the spec can be acted on")


def model_available(state: ServiceState) -> Condition:
    kind = "ModelAvailable"
    if state.preparing is not None and state.preparing.condition == kind:
        return Condition(kind, "False", state.preparing.reason, state.preparing.message)
    for pod in state.newest:
        for ended in (pod.ended, pod.download_ended):
            if ended is not None and meaning(ended.code).condition == kind:
                return Condition(kind, "False", meaning(ended.code).reason, ended.message)
        if pod.waiting_reason == "CreateContainerConfigError":
            return Condition(kind, "False", "SecretMissing", pod.waiting_message)
    if any(p.downloading for p in state.newest):
        return Condition(kind, "False", "Downloading", "the model is being downloaded")
    if any(p.running or p.ended is not None for p in state.newest):
        if state.spec.inputs["model"].get("loadFormat") == "random":
            return Condition(kind, "True", "Random", "weights are random, from config.json alone")
        return Condition(kind, "True", "Available", state.spec.source.text)
    waits = next(filter(None, map(waiting, state.newest)), "no container has run yet")
    return Condition(kind, "Unknown", "Pending", waits)


def progressing(state: ServiceState) -> Condition:
    kind = "Progressing"
    error = state.apply_error
    if error is not None and error.type == kind:
        return error
    if state.preparing is not None and state.preparing.condition == kind:
        return Condition(kind, "False", state.preparing.reason, state.preparing.message)
    for pod in state.newest:
        if pod.unschedulable and not pod.awaits:
            return Condition(kind, "False", "Unschedulable", pod.unschedulable)
        if pod.waiting_reason in IMAGE_REASONS:
            text = f"{pod.waiting_reason}: {pod.waiting_message}"
            return Condition(kind, "False", "ImagePullFailed", text)
    ended = _lost(state)
    if ended is not None:
        return ended
    if _is_complete(state):
        return Condition(kind, "True", "Complete", "")
    if state.refused:
        if "quota" in state.refused:
            return Condition(kind, "False", "QuotaExceeded", state.refused)
        return Condition(kind, "False", "PodsRefused", state.refused)
    refused = _refused_device(state)
    if refused is not None:
        return Condition(kind, "False", "DeviceFailure", refused.text)
    if state.deadline_exceeded and not any(p.downloading for p in state.newest):
        return Condition(kind, "False", "DeadlineExceeded", "no progress within the deadline")
    waits = next(filter(None, map(waiting, state.newest)), "")
    text = f"{_counts(state)}; {waits}" if waits else _counts(state)
    return Condition(kind, "True", "RollingOut", text)


def _lost(state: ServiceState) -> Condition | None:
    """A replica that lost its device, a rank or its progress and is not validated again. Stable
    ones count during a rollout as well, which a held gate makes last for days."""
    kind = "Progressing"
    stable = () if state.plan.newest == state.plan.stable else state.stable
    for pod in (*state.newest, *stable):
        if pod.failed is not None and meaning(pod.failed.code).condition == kind:
            text = f"{pod.name}: {pod.failed.message}" if pod in stable else pod.failed.message
            return Condition(kind, "False", meaning(pod.failed.code).reason, text)
    return None


def _is_complete(state: ServiceState) -> bool:
    ready = sum(1 for p in state.newest if p.ready)
    return not state.plan.candidate and ready >= state.spec.replicas


def _counts(state: ServiceState) -> str:
    ready = sum(1 for p in state.newest if p.ready)
    text = f"{ready} of {state.spec.replicas} replicas are ready"
    ended = _ended_newest(state)
    if ended:
        text += f"; terminal pods: {len(ended)}, the last one {ended[0].text}"
    return text


def _ended_newest(state: ServiceState) -> list[EndedPod]:
    """Terminal pods of the newest revision, newest first."""
    return [p for p in state.ended if p.revision == state.plan.newest]


def _refused_device(state: ServiceState) -> EndedPod | None:
    """The last pod of the spec's revision whose node could not allocate a GPU, until a container of
    a newer pod has run."""
    ran = max((p.created for p in state.newest if p.running or p.ended or p.ready), default="")
    for pod in _ended_newest(state) if state.spec.gpus else ():
        if pod.reason == REFUSED and pod.created >= ran:
            return pod
    return None


def up_to_date(state: ServiceState) -> Condition:
    kind = "UpToDate"
    plan = state.plan
    if plan.rejected and plan.gate is not None:
        text = f"revision {plan.rejected} was rejected, {_who_serves(state)}: {plan.gate.message}"
        return Condition(kind, "False", "RevisionRejected", text)
    if plan.candidate and plan.gate is not None:
        return _in_progress(kind, state, plan.gate)
    if state.apply_error is not None and state.apply_error.type == kind:
        return state.apply_error
    ready = sum(1 for p in state.newest if p.ready)
    others = sum(1 for p in state.pods if p.ready) - ready
    if others:
        text = (
            f"revision {plan.stable} is stable; {others} replicas of others are still to be removed"
        )
        return Condition(kind, "False", "RollingOut", text)
    if ready == state.spec.replicas == len(state.newest):
        return Condition(kind, "True", "UpToDate", f"revision {state.plan.stable}")
    return Condition(kind, "False", "Scaling", _counts(state))


def _who_serves(state: ServiceState) -> str:
    """Which revision serves; the stable one only once it has ready replicas again."""
    ready = {p.revision for p in state.pods if p.ready}
    if state.plan.stable in ready:
        return f"{state.plan.stable} serves"
    others = " and ".join(sorted(ready))
    return (
        f"{others} serves" if others else f"nothing serves until {state.plan.stable} is ready again"
    )


def _in_progress(kind: str, state: ServiceState, gate: Verdict) -> Condition:
    name = f"revision {state.plan.candidate}"
    nothing = "" if any(p.ready for p in state.pods) else "; nothing serves meanwhile"
    if state.plan.paused:
        text = f"{name} is paused: spec.rollout.paused is true{nothing}"
        return Condition(kind, "False", "Paused", text)
    if gate.result is GateResult.PASSED:
        text = f"{name} is rolled out: {_counts(state)}{nothing}"
        return Condition(kind, "False", "RollingOut", text)
    if gate.result is GateResult.REJECTED:
        serves = "nothing serves" if nothing else _who_serves(state)
        text = f"{name} is kept out of traffic, {serves}: {gate.message}"
        return Condition(kind, "False", "RevisionRejected", text)
    if gate.blocked:
        return Condition(kind, "False", "GateHeld", f"{name}: {gate.message}{nothing}")
    text = f"{name} is measured before it takes traffic: {gate.message}{nothing}"
    return Condition(kind, "False", "RollingOut", text)


def scaling_active(scaling: Scaling) -> Condition:
    known = scaling.reason is not Activity.UNKNOWN
    return Condition("ScalingActive", str(known), scaling.reason, scaling.message)


def _serve(pods: tuple[PodView, ...]) -> str:
    return f"{len(pods)} replicas serve" if len(pods) > 1 else "1 replica serves"


def ready(state: ServiceState, others: list[Condition]) -> Condition:
    kind = "Ready"
    if state.serving:
        tokens = sum(p.kv_tokens or 0 for p in state.serving)
        return Condition(kind, "True", "Serving", f"{_serve(state.serving)} {tokens} KV tokens")
    # Ready pods of an accepted revision have validated their size. CapacityMeasured reports that
    # this operator cannot read it.
    unread = tuple(p for p in state.stable if p.ready)
    if unread and state.stable_state.accepted:
        return Condition(kind, "True", "Serving", f"{_serve(unread)}; their reports cannot be read")
    if state.spec.replicas == 0:
        return Condition(kind, "False", "ScaledToZero", "spec.replicas is 0")
    by_type = {c.type: c for c in others}
    # DeadlineExceeded last: what the rollout waits for, such as a download, says more.
    order = sorted(READY_ORDER, key=lambda name: by_type[name].reason == "DeadlineExceeded")
    for condition in (by_type[name] for name in order):
        if condition.status != "True":
            return Condition(kind, "False", condition.reason, condition.message)
    return Condition(kind, "False", "ReportMissing", "ready pods have no readable report")
