"""One reconcile of an InferenceService: read, parse, observe, plan, apply, write status.

Level-triggered: it may run twice, stop half-way, run late or on stale data, and does not depend on
which event triggered it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from kvline_contract.codec import ContractError
from kvline_contract.launch import Record, Reuse
from kvline_contract.names import (
    KIND,
    LABEL_REVISION,
    SCALE_FILE,
    base_name,
    gate_name,
    records_name,
    scale_name,
)
from kvline_contract.report import State
from kvline_contract.times import stamp
from kvline_operator.api.key import Key
from kvline_operator.api.spec import ServiceSpec, parse
from kvline_operator.apply import ensure as apply
from kvline_operator.apply import notices
from kvline_operator.apply.drift import Corrections
from kvline_operator.apply.tokens import Tokens
from kvline_operator.errors import Denied, Forbidden, Invalid, NameConflict, SpecError
from kvline_operator.kube import Kube
from kvline_operator.observe.children import Observed, observe
from kvline_operator.observe.claims import Claims
from kvline_operator.observe.ended_pods import surplus
from kvline_operator.observe.pod_ownership import PodOwnership
from kvline_operator.observe.reports import Reports
from kvline_operator.plan import autoscale, candidate, jobs, prepare, render, revisions, rollout
from kvline_operator.plan.rollout_state import RolloutState
from kvline_operator.report import status, status_cache
from kvline_operator.report.service_state import Condition, Scaling, ServiceState, newly_ended
from kvline_operator.report.status_cache import StatusCache, View
from kvline_operator.settings import Settings
from kvline_operator.store import records, revision_state
from kvline_operator.store.revision_state import RevisionState

log = logging.getLogger("kvline")
CLAIMED_SECONDS = 30.0  # until a service that another release has is looked at again
Object = dict[str, Any]
RETRY_REFUSED = 300.0  # seconds until a refused write is retried


@dataclass(frozen=True, slots=True)
class Context:
    """Clients, caches and settings shared by all reconciles of the process."""

    kube: Kube
    settings: Settings
    reports: Reports
    pool: ThreadPoolExecutor
    status_cache: StatusCache
    pod_ownership: PodOwnership
    claims: Claims
    corrections: Corrections = field(default_factory=Corrections)
    tokens: Tokens = field(default_factory=Tokens)
    now: Callable[[], datetime] = lambda: datetime.now(UTC)

    def stamp(self) -> str:
        return stamp(self.now())


def reconcile(context: Context, key: Key) -> float:
    """Brings one service closer to its spec. Returns the seconds after which to requeue it; 0: with
    the next event."""
    if context.claims.other(key.namespace):
        context.status_cache.drop(key)
        return CLAIMED_SECONDS
    body = context.kube.get(KIND, key.namespace, key.name)
    if body is None or body["metadata"].get("deletionTimestamp"):
        context.status_cache.drop(key)
        return 0.0  # its children are garbage collected
    try:
        spec = parse(body)
        observed = observe(context.kube, spec, context.reports, context.pool, context.pod_ownership)
        scale, scaling = _scale(spec, observed, context.now())
        spec = replace(spec, replicas=scale.replicas) if scale else spec
        revision, stored, known = _revision(spec, observed, context.settings)
    except (SpecError, Forbidden) as error:
        reason = "SpecInvalid" if isinstance(error, SpecError) else "Forbidden"
        wrong = Condition("Accepted", "False", reason, str(error))
        new, events = status.refused(wrong, body, context.stamp())
        context.status_cache.refuse(key, body.get("spec") or {}, new)
        _write_status(context, body, new, events)
        return RETRY_REFUSED  # roles and served APIs change without an event
    notices.end_waits(context.reports, context.pool, context.tokens, spec.uid, observed.needless)
    known, pods = candidate.counted(known, observed.pods)
    observed = replace(observed, pods=pods)
    rollout_state = RolloutState.of(spec, observed, revision.name, stored, known, context.now())
    recorded = _records(spec, observed)
    # With Never it is there before the first pod, which would start again from its own record.
    wanted = recorded or spec.reuse is Reuse.NEVER
    maps = [render.records_map(spec, recorded)] if wanted else []
    maps += [render.scale_map(spec, scale)] if scale else []
    apply_error = _apply(context, spec, observed, rollout_state, maps)
    if apply_error is None or apply_error.reason == "ForeignChange":  # all is written
        waiting = rollout_state.to_notify(observed.pods)
        notices.open_gates(context.reports, context.pool, context.tokens, spec.uid, waiting)
    before = context.status_cache.get(key)
    # The status is of what was observed before the writes; their events requeue this service.
    state = ServiceState(
        spec=spec,
        plan=rollout_state.plan,
        pods=observed.pods,
        ended=observed.ended,
        stable_state=rollout_state.states.get(rollout_state.plan.stable, RevisionState()),
        limits=rollout_state.thresholds(rollout_state.plan.newest, spec),
        image_outdated=_image_outdated(spec, rollout_state, context.settings),
        records=recorded,
        apply_error=apply_error,
        deadline_exceeded=_deadline_exceeded(observed, rollout_state.plan.newest),
        refused=observed.refused(rollout_state.plan.newest),
        scaling=scaling,
        preparing=rollout_state.preparing,
        stable_data=rollout_state.stored.get(rollout_state.plan.stable, {}).get("data", {}),
        newly_ended=newly_ended(observed.pods, before.pods if before is not None else ()),
    )
    new, events = status.build(state, body.get("status") or {}, context.stamp())
    history = status_cache.history(rollout_state.stored, rollout_state.states)
    context.status_cache.put(View(key, body["spec"], new, observed.pods, history))
    _write_status(context, body, new, events)
    return requeue_after(context, state)


def _scale(
    spec: ServiceSpec, observed: Observed, now: datetime
) -> tuple[autoscale.Scale | None, Scaling | None]:
    """The autoscaler's decision, which is stored, and ScalingActive; None where it is off."""
    policy, ready = spec.autoscaling, [p.load for p in observed.pods if p.ready]
    if policy is None:
        return None, None
    stored = observed.config_map(scale_name(spec.base)) or {}
    before = autoscale.Scale.parse((stored.get("data") or {}).get(SCALE_FILE))
    demand = autoscale.demand(ready, policy.target_percent)
    existing = sum(s.replicas for s in observed.deployment_states())
    minute_ago = stamp(now - autoscale.STEP)
    settled = sum(1 for p in observed.pods if p.ready and p.ready_since <= minute_ago)
    after = autoscale.decide(before, existing, demand, policy, now, settled)
    reason, text = autoscale.activity(after, demand, policy, len(ready))
    return after, Scaling(reason, text, after.replicas, after.why)


def _revision(
    spec: ServiceSpec, observed: Observed, settings: Settings
) -> tuple[revisions.Revision, dict[str, Object], dict[str, RevisionState]]:
    """The revision of the current spec; all ControllerRevisions by revision, including a new one
    that is not written yet; and the stored state of each."""
    stored = {
        item["metadata"]["labels"][LABEL_REVISION]: item
        for item in observed.revisions
        if LABEL_REVISION in (item["metadata"].get("labels") or {})
    }
    existing = revisions.known(list(stored.values()))
    known = {name: revision_state.read(item) for name, item in stored.items()}
    stable = revision_state.stable(known)
    wanted = revisions.wanted(spec, existing, settings.image_for(spec.gpus), stable)
    if wanted.name not in stored:
        stored[wanted.name] = render.controller_revision(spec, wanted, settings)
        known[wanted.name] = RevisionState()
    return wanted, stored, known


def _image_outdated(spec: ServiceSpec, rollout_state: RolloutState, settings: Settings) -> bool:
    stored = rollout_state.stored.get(rollout_state.plan.stable)
    default = settings.image_for(spec.gpus)
    return bool(stored and default and not spec.image and stored["data"]["image"] != default)


def _records(spec: ServiceSpec, observed: Observed) -> dict[str, Record]:
    """The recorded sizes, with those that replicas have measured since."""
    name = records_name(spec.base)
    try:
        recorded = records.read(observed.config_map(name))
    except ContractError as error:
        log.warning("%s/%s is measured and written anew: %s", spec.namespace, name, error)
        recorded = {}
    return records.merge(recorded, [p.report for p in observed.pods if p.report is not None])


def _apply(
    context: Context,
    spec: ServiceSpec,
    observed: Observed,
    rollout_state: RolloutState,
    maps: list[Object],
) -> Condition | None:
    """Writes what differs, then prunes. An error that a user must act on becomes a condition."""
    try:
        budget = render.disruption_budget(spec, rollout_state.plan)
        objects = [*render.service_objects(spec, context.settings, rollout_state.download), budget]
        lasting = [_ensure(context, observed, wanted) for wanted in objects]
        lasting += [_ensure(context, observed, wanted, exact=True) for wanted in maps]
        _store_states(context, spec, rollout_state)
        for name, replicas in rollout.write_order(
            rollout_state.plan.replicas, observed.deployment_states()
        ):
            if name not in rollout_state.stored:
                continue  # its ControllerRevision was deleted: the Deployment stays unchanged
            seen = observed.config_map(gate_name(spec.base, name))
            rolls = bool(rollout_state.plan.candidate)
            digest = notices.digest(context.tokens, (spec.uid, name), seen, rolls)
            gate = rollout_state.gate(name, spec, digest)
            launch = _launch(context, spec, observed, rollout_state.stored[name])
            objects = render.revision_objects(
                spec, rollout_state.stored[name], replicas, gate, launch
            )
            lasting += [_ensure(context, observed, wanted) for wanted in objects]
        _prepare(context, spec, observed, rollout_state.preparing)
        _prune(context, spec, observed, rollout_state.plan)
        if spec.autoscaling is None and (old := observed.config_map(scale_name(spec.base))):
            apply.prune(context.kube, old, "ConfigMap")
    except NameConflict as error:
        return Condition("Accepted", "False", "NameConflict", str(error))
    except Forbidden as error:
        return Condition("Accepted", "False", "Forbidden", str(error))
    except Denied as error:
        return Condition("Progressing", "False", error.answer.refusal, str(error))
    except Invalid as error:
        return Condition("Accepted", "False", "SpecInvalid", str(error))
    return _foreign_change([text for text in lasting if text])


def _foreign_change(lasting: list[str]) -> Condition | None:
    """Changes by others that came back after each removal."""
    if not lasting:
        return None
    text = "; ".join(lasting) + ": set again after each removal, so it is not removed for an hour, "
    text += "and pods may run with it. Stop its manager, and change the InferenceService instead"
    return Condition("UpToDate", "False", "ForeignChange", text)


def _prepare(
    context: Context, spec: ServiceSpec, observed: Observed, wanted: prepare.Preparation | None
) -> None:
    """Creates the Job that the pods wait for and deletes other unfinished ones; finished Jobs are
    deleted by their TTL. Jobs are immutable, so none is updated."""
    name = wanted.name if wanted is not None else ""
    for job in prepare.unfinished(observed):
        if job["metadata"]["name"] != name:
            apply.prune(context.kube, job, "Job")
    if wanted is None or wanted.exists:
        return
    _ensure(context, observed, jobs.policy(spec, context.settings))
    if not context.kube.create(wanted.job):
        raise NameConflict(f"Job {name} exists and is not this service's; rename one of the two")


def _launch(context: Context, spec: ServiceSpec, observed: Observed, stored: Object) -> str:
    """A revision's launch file: from its ControllerRevision, else from the live ConfigMap."""
    if "launch" in stored["data"]:
        return render.launch_text(spec, stored, None)
    name = stored["metadata"]["name"]
    live = observed.config_map(name) or context.kube.get("ConfigMap", spec.namespace, name)
    return render.launch_text(spec, stored, live)


def _ensure(context: Context, observed: Observed, wanted: Object, exact: bool = False) -> str:
    """Applies an object. Returns a description of a change by others that is tolerated for now;
    empty where there is none, or where it was removed, which is reported as an event."""
    kind, meta = wanted["kind"], wanted["metadata"]
    seen = observed.child(kind, meta["name"])
    absent = observed.lists(kind) or not observed.revisions
    dispute = apply.ensure(context.kube, wanted, seen, absent, exact, context.corrections)
    if dispute is None or dispute.settled:
        return dispute.text if dispute is not None else ""
    # Now and not with the status: a later write may fail, and the event would be lost.
    of = meta["ownerReferences"][0]
    owner = render.Owner(meta["namespace"], of["name"], of["uid"], base_name(of["name"]))
    text = f"{dispute.text}: removed; change the InferenceService instead"
    event = ("ForeignChangeRemoved", "Warning", text)
    context.kube.create(render.event(owner, event, dispute.version, context.stamp()))
    return ""


def _store_states(context: Context, spec: ServiceSpec, rollout_state: RolloutState) -> None:
    """Before the plan is applied, so that a crash in between does not lose a verdict. Written only
    over the version that was read: after a write by another operator this reconcile fails and runs
    again."""
    for name, stored in rollout_state.stored.items():
        annotations = revision_state.to_annotations(rollout_state.states.get(name, RevisionState()))
        if "resourceVersion" not in stored["metadata"]:  # new
            apply.ensure(
                context.kube, render.with_annotations(spec, stored, annotations), absent=True
            )
        elif annotations != revision_state.to_annotations(revision_state.read(stored)):
            context.kube.apply(
                render.with_annotations(spec, stored, annotations), over=stored, exact=True
            )


def _prune(
    context: Context, spec: ServiceSpec, observed: Observed, plan: rollout.RolloutPlan
) -> None:
    """Deletes Deployments, ConfigMaps and ResourceClaimTemplates of revisions that are not in the
    plan, and all but the newest ten ControllerRevisions and terminal pods."""
    of_revisions: tuple[tuple[str, Sequence[Object]], ...] = (
        ("Deployment", observed.deployments),
        ("ConfigMap", observed.config_maps),
        ("ResourceClaimTemplate", observed.claim_templates),
    )
    for kind, items in of_revisions:
        for item in items:
            revision = (item["metadata"].get("labels") or {}).get(LABEL_REVISION)
            if revision and revision not in plan.replicas:
                apply.prune(context.kube, item, kind)
    for pod in surplus(observed.ended):
        context.kube.delete("Pod", spec.namespace, pod.name, pod.uid)
    newest = sorted(observed.revisions, key=lambda r: r.get("revision", 0), reverse=True)
    for item in newest[revisions.HISTORY_LIMIT :]:
        if (item["metadata"].get("labels") or {}).get(LABEL_REVISION) not in plan.replicas:
            apply.prune(context.kube, item, "ControllerRevision")


def _write_status(context: Context, body: Object, new: Object, events: list[status.Event]) -> None:
    """Events first, then one status write where the status has changed. An event's name is a hash
    of its content and the object's version, so a repeat after a crash adds none."""
    meta = body["metadata"]
    owner = render.Owner(meta["namespace"], meta["name"], meta["uid"], base_name(meta["name"]))
    for item in events:
        event = (item.reason, item.kind, item.message)
        context.kube.create(render.event(owner, event, meta["resourceVersion"], context.stamp()))
        log.info("%s/%s: %s: %s", meta["namespace"], meta["name"], item.reason, item.message)
    if new != (body.get("status") or {}):
        context.kube.replace_status(meta["namespace"], meta["name"], new, meta["resourceVersion"])


def _deadline_exceeded(observed: Observed, revision: str) -> bool:
    """Whether this revision's Deployment reports ProgressDeadlineExceeded. It does not for a
    replica that was ready before: that one has its own reason."""
    return any(
        condition.get("reason") == "ProgressDeadlineExceeded"
        for item in observed.deployments
        if item["metadata"]["labels"].get(LABEL_REVISION) == revision
        for condition in (item.get("status") or {}).get("conditions") or []
    )


def requeue_after(context: Context, state: ServiceState) -> float:
    """Seconds until the next poll: short while a replica is being measured, whose progress is only
    in its sizing report; longer while anything else is in progress, in case an event is missed."""
    measured = [p.report for p in state.pods if p.running and not p.validated]
    if measured:
        validating = any(r is not None and r.state is State.VALIDATING for r in measured)
        outage = state.plan.candidate and not any(p.ready for p in state.pods)
        # The verdict that is near ends it, whatever it is.
        return context.settings.poll_seconds / (4 if validating and outage else 1)
    again = RETRY_REFUSED if state.apply_error is not None else 0.0  # RBAC changes cause no event
    settled = (
        not state.plan.candidate
        and len(state.newest) == state.spec.replicas
        and all(p.ready and p.validated and not p.report_error for p in state.newest)
    )
    if not settled:
        return min(context.settings.poll_seconds * 30, context.settings.resync_seconds)
    if state.scaling is not None:
        return context.settings.load_seconds
    return again
