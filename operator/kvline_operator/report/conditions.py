"""The conditions of a service. Pure; docs/operations.md lists types and reasons.

All have positive polarity: True is good. Reasons are part of the API.
"""

from __future__ import annotations

from dataclasses import replace

from kvline_contract.counts import counted
from kvline_contract.names import revision_name
from kvline_contract.report import State
from kvline_operator.observe import trouble
from kvline_operator.observe.ended_pods import EndedPod
from kvline_operator.observe.pods import PodView
from kvline_operator.observe.trouble import Effect, Trouble
from kvline_operator.plan.autoscale import Activity, Scaling
from kvline_operator.report import capacity, failures
from kvline_operator.report.service_state import Condition, ServiceState
from kvline_operator.store.verdict import Phase, Verdict

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
    found = next((t for t in state.troubles if t.condition == "Accepted"), None)
    if found is not None:
        return _of(found)
    return Condition("Accepted", "True", "Valid", "the spec can be acted on")


def _of(found: Trouble) -> Condition:
    return Condition(found.condition, "False", found.reason, found.message)


def model_available(state: ServiceState) -> Condition:
    """True only where a pod or Job has seen the model: a container that runs has not yet. That of
    an accepted revision without pods was seen, whatever keeps them away now."""
    kind = "ModelAvailable"
    job = state.preparing
    if job is not None and job.trouble is not None and job.trouble.condition == kind:
        return _of(job.trouble)
    found = [t for t in state.troubles if t.condition == kind]
    if found:
        return _of(min(found, key=lambda t: t.effect is Effect.WAITS))
    if any(map(trouble.has_seen_model, state.newest)) or (job is not None and job.has_read):
        if state.inputs["model"].get("loadFormat") == "random":
            return Condition(kind, "True", "Random", "weights are random, from config.json alone")
        return Condition(kind, "True", "Available", state.spec.source.text)
    reports = (p.report for p in state.newest if p.report is not None)
    loading = next((r for r in reports if r.state is State.LOADING), None)
    if loading is not None:
        return Condition(kind, "Unknown", "Loading", capacity.stage(loading))
    found = [t for t in state.troubles if t.effect is Effect.WAITS]
    waits = [t.message for t in found if t.condition == "Progressing"]
    runs = any(p.running or p.ended is not None for p in state.newest)
    if not state.newest and state.phases.get(state.plan.newest) is Phase.ACCEPTED:
        text = f"{state.spec.source.text}, which an earlier replica has loaded"
        return Condition(kind, "True", "Available", text)
    waits += ["no container has read it yet" if runs else "no container has run yet"]
    return Condition(kind, "Unknown", "Pending", waits[0])


def progressing(state: ServiceState) -> Condition:
    kind = "Progressing"
    error = state.apply_error
    if error is not None and error.type == kind:
        return error
    job = state.preparing
    if job is not None and job.trouble is not None and job.trouble.condition == kind:
        return _of(job.trouble)
    found = [t for t in state.troubles if t.condition == kind]
    stops = next((t for t in found if t.effect is not Effect.WAITS), None) or _of_stable(state)
    if stops is not None:
        return _of(stops)
    if _is_complete(state):
        return Condition(kind, "True", "Complete", "")
    if state.refusal is not None:
        return _of(state.refusal)
    if state.deadline_exceeded and not any(p.downloading for p in state.newest):
        seconds = state.spec.rollout.progress_deadline_seconds
        text = f"no progress within spec.rollout.progressDeadlineSeconds ({seconds})"
        return Condition(kind, "False", "DeadlineExceeded", text)
    text = f"{_counts(state)}; {found[0].message}" if found else _counts(state)
    return Condition(kind, "True", "RollingOut", text)


def _of_stable(state: ServiceState) -> Trouble | None:
    """Of a stable replica that lost its device, a rank or its progress. It counts during a rollout
    as well, which a held gate makes last for days."""
    stable = () if state.plan.newest == state.plan.stable else state.stable
    found = ((p, trouble.of(p)) for p in stable if p.failed is not None)
    lost = ((p, t) for p, t in found if t is not None and t.condition == "Progressing")
    return next((replace(t, message=f"{p.name}: {t.message}") for p, t in lost), None)


def _is_complete(state: ServiceState) -> bool:
    ready = sum(1 for p in state.newest if p.ready)
    rolls = state.plan.candidate and state.spec.replicas
    return not rolls and ready >= state.spec.replicas


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


def up_to_date(state: ServiceState) -> Condition:
    kind = "UpToDate"
    plan = state.plan
    if plan.gate is not None and plan.gate.promotion_refused and _waits_for_a_user(plan.gate):
        name = f"revision {plan.rejected or plan.candidate}"
        text = f"{name} is not promoted, {plan.gate.promotion_refused}: {plan.gate.message}"
        return Condition(kind, "False", "PromotionRefused", text)
    if plan.rejected and plan.gate is not None:
        text = f"revision {plan.rejected} was rejected, {_who_serves(state)}: {plan.gate.message}"
        return Condition(kind, "False", "RevisionRejected", text)
    if plan.candidate and plan.gate is not None:
        waits = not state.spec.replicas and not plan.paused
        if waits and plan.gate.phase is not Phase.REJECTED:
            return _without_replicas(kind, state)
        return _in_progress(kind, state, plan.gate)
    if state.apply_error is not None and state.apply_error.type == kind:
        return state.apply_error
    ready = sum(1 for p in state.newest if p.ready)
    others = sum(1 for p in state.pods if p.ready) - ready
    if others:
        left = counted(others, "replica")
        text = f"revision {plan.stable} is stable; still to be removed: {left} of others"
        return Condition(kind, "False", "RollingOut", text)
    if ready == state.spec.replicas == len(state.newest):
        return Condition(kind, "True", "UpToDate", f"revision {state.plan.stable}")
    return Condition(kind, "False", "Scaling", _counts(state))


def _without_replicas(kind: str, state: ServiceState) -> Condition:
    """A candidate that spec.replicas gives no replica: there is nothing to wait for."""
    if state.pods:
        text = f"spec.replicas is 0; still to be removed: {counted(len(state.pods), 'replica')}"
        return Condition(kind, "False", "Scaling", text)
    text = (
        f"spec.replicas is 0: revision {state.plan.candidate} is rolled out once there are "
        f"replicas, and {state.plan.stable} is stable until then"
    )
    return Condition(kind, "True", "ScaledToZero", text)


def _waits_for_a_user(gate: Verdict) -> bool:
    return gate.phase in (Phase.HELD, Phase.REJECTED, Phase.EXPIRED)


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
    if gate.phase is Phase.PASSED:
        text = f"{name} is rolled out: {_counts(state)}{nothing}"
        return Condition(kind, "False", "RollingOut", text)
    if gate.phase is Phase.REJECTED:
        serves = "nothing serves" if nothing else _who_serves(state)
        text = f"{name} is kept out of traffic, {serves}: {gate.message}"
        return Condition(kind, "False", "RevisionRejected", text)
    if gate.phase is Phase.HELD:
        return Condition(kind, "False", "GateHeld", f"{name}: {gate.message}{nothing}")
    error = state.apply_error
    if error is not None and failures.refuses(error, _deployment(state)):
        return Condition(kind, "False", "GateHeld", f"{name}: {error.message}{nothing}")
    text = f"{name} is measured before it takes traffic: {gate.message}{nothing}"
    return Condition(kind, "False", "RollingOut", text)


def _deployment(state: ServiceState) -> str:
    """Of the candidate, as the API's errors name it."""
    name = revision_name(state.spec.base, state.plan.candidate)
    return f"Deployment {state.spec.namespace}/{name}"


def scaling_active(scaling: Scaling) -> Condition:
    known = scaling.reason is not Activity.UNKNOWN
    return Condition("ScalingActive", str(known), scaling.reason, scaling.message)


def _serve(pods: tuple[PodView, ...]) -> str:
    return f"{counted(len(pods), 'replica')} {'serves' if len(pods) == 1 else 'serve'}"


def ready(state: ServiceState, others: list[Condition]) -> Condition:
    kind = "Ready"
    if state.serving:
        sizes = [p.result for p in state.serving if p.result is not None]
        tokens = sum(size.kv_tokens for size in sizes)
        slots = sum(size.state_slots or 0 for size in sizes)
        at_once = f", {counted(slots, 'sequence')} at once" if slots else ""
        text = f"{_serve(state.serving)} {tokens} KV tokens{at_once}"
        return Condition(kind, "True", "Serving", text)
    # Ready pods of an accepted revision have validated their size. CapacityMeasured reports that
    # this operator cannot read it.
    unread = tuple(p for p in state.stable if p.ready)
    if unread and state.stable_state.accepted:
        return Condition(kind, "True", "Serving", f"{_serve(unread)}; their reports cannot be read")
    if state.spec.replicas == 0:
        return Condition(kind, "False", "ScaledToZero", "spec.replicas is 0")
    by_type = {c.type: c for c in others}
    # A model that was not seen yet says less than the stage or the failure of its server, and
    # DeadlineExceeded less than what the rollout waits for, such as a download.
    unseen = by_type["ModelAvailable"].status == "Unknown"
    says_more = by_type["CapacityMeasured"].reason not in ("Pending", "Validated")
    late = {"ModelAvailable"} if unseen and says_more else set()
    late |= {c.type for c in others if c.reason == "DeadlineExceeded"}
    for condition in (by_type[name] for name in sorted(READY_ORDER, key=late.__contains__)):
        if condition.status != "True":
            return Condition(kind, "False", condition.reason, condition.message)
    return Condition(kind, "False", "ReportMissing", "ready pods have no readable report")
