"""One reconcile: read, parse, observe, plan, apply, report.

Can run twice, half-way, late or on stale data, and never needs to know which event woke it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from kvline_contract.launch import Record
from kvline_contract.names import (
    KIND,
    LABEL_REVISION,
    SCALE_FILE,
    base_name,
    records_name,
    scale_name,
)
from kvline_operator import (
    apply,
    autoscale,
    jobs,
    prepare,
    records,
    render,
    revision_state,
    revisions,
    rollout,
    status,
)
from kvline_operator.drift import Corrections
from kvline_operator.ended_pods import surplus
from kvline_operator.errors import Forbidden, Invalid, NameConflict, SpecError
from kvline_operator.kube import Kube
from kvline_operator.observe import Observed, observe
from kvline_operator.pod_ownership import PodOwnership
from kvline_operator.revision_state import RevisionState
from kvline_operator.rollout_state import RolloutState
from kvline_operator.service_state import Condition, Scaling, ServiceState
from kvline_operator.settings import Settings
from kvline_operator.sizing import Reports
from kvline_operator.spec import ServiceSpec, parse
from kvline_operator.status_cache import StatusCache, View, past
from kvline_operator.workqueue import Key

log = logging.getLogger("kvline")
Object = dict[str, Any]
RETRY_REFUSED = 300.0  # seconds until what the API server refused is tried again


@dataclass(frozen=True, slots=True)
class Context:
    """What a reconcile works with; one for the process."""

    kube: Kube
    settings: Settings
    reports: Reports
    pool: ThreadPoolExecutor
    board: StatusCache
    lineage: PodOwnership
    corrections: Corrections = field(default_factory=Corrections)
    now: Callable[[], datetime] = lambda: datetime.now(UTC)

    def stamp(self) -> str:
        return self.now().strftime("%Y-%m-%dT%H:%M:%SZ")


def reconcile(context: Context, key: Key) -> float:
    """Brings one service a step closer; returns in how many seconds to look again, 0 for when
    something changes."""
    body = context.kube.get(KIND, key.namespace, key.name)
    if body is None or body["metadata"].get("deletionTimestamp"):
        context.board.drop(key)
        return 0.0  # owner references clean up; nothing is ours to do
    try:
        spec = parse(body)
        observed = observe(context.kube, spec, context.reports, context.pool, context.lineage)
        scale, scaling = _scale(spec, observed, context.now())
        spec = replace(spec, replicas=scale.replicas) if scale else spec
        revision, stored, known = _revision(spec, observed, context.settings)
    except (SpecError, Forbidden) as error:
        reason = "SpecInvalid" if isinstance(error, SpecError) else "Forbidden"
        wrong = Condition("Accepted", "False", reason, str(error))
        said, news = status.refused(wrong, body, context.stamp())
        context.board.refuse(key, body.get("spec") or {}, said)
        _report(context, body, said, news)
        return RETRY_REFUSED if reason == "Forbidden" else 0.0
    rollout_state = RolloutState.of(spec, observed, revision.name, stored, known, context.now())
    kept = _records(spec, observed)
    maps = [render.records_map(spec, kept)] if kept else []
    maps += [render.scale_map(spec, scale)] if scale else []
    refusal = _apply(context, spec, observed, rollout_state, maps)
    # What was observed before the writes is told: the events of the writes wake this key again.
    state = ServiceState(
        spec=spec,
        plan=rollout_state.plan,
        pods=observed.pods,
        ended=observed.ended,
        stable_state=rollout_state.states.get(rollout_state.plan.stable, RevisionState()),
        limits=rollout_state.thresholds(rollout_state.plan.newest, spec),
        image_outdated=_image_outdated(spec, rollout_state, context.settings),
        records=kept,
        apply_error=refusal,
        deadline_exceeded=_deadline_exceeded(observed, rollout_state.plan.newest),
        refused=observed.refused(rollout_state.plan.newest),
        scaling=scaling,
        preparing=rollout_state.preparing,
        stable_data=rollout_state.stored.get(rollout_state.plan.stable, {}).get("data", {}),
    )
    said, news = status.build(state, body.get("status") or {}, context.stamp())
    history = past(rollout_state.stored, rollout_state.states)
    context.board.put(View(key, body["spec"], said, observed.pods, history))
    _report(context, body, said, news)
    return _look_again(context, state)


def _scale(
    spec: ServiceSpec, observed: Observed, now: datetime
) -> tuple[autoscale.Scale | None, Scaling | None]:
    """The replicas that the load asks for, to be remembered, and what is said of it."""
    how, ready = spec.autoscaling, [p.load for p in observed.pods if p.ready]
    if how is None:
        return None, None
    kept = observed.config_map(scale_name(spec.base)) or {}
    before = autoscale.Scale.parse((kept.get("data") or {}).get(SCALE_FILE))
    asked = autoscale.demand(ready, how.target_percent)
    existing = sum(s.replicas for s in observed.deployment_states())
    after = autoscale.decide(before, existing, asked, how, now)
    reason, text = autoscale.activity(after, asked, how, len(ready))
    return after, Scaling(reason, text, after.replicas, after.why)


def _revision(
    spec: ServiceSpec, observed: Observed, settings: Settings
) -> tuple[revisions.Revision, dict[str, Object], dict[str, RevisionState]]:
    """The revision the spec means; by revision name every ControllerRevision, its own among them,
    and what is remembered of each."""
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
    """The sizes on record, and those that replicas have found since."""
    kept = records.read(observed.config_map(records_name(spec.base)))
    return records.merge(kept, [p.result for p in observed.pods if p.result is not None])


def _apply(
    context: Context,
    spec: ServiceSpec,
    observed: Observed,
    rollout_state: RolloutState,
    maps: list[Object],
) -> Condition | None:
    """Writes what differs, then prunes. A refusal that a person must see becomes a condition."""
    try:
        budget = render.disruption_budget(spec, rollout_state.plan)
        objects = [*render.service_objects(spec, context.settings, rollout_state.download), budget]
        disputes = [_ensure(context, observed, wanted) for wanted in objects]
        disputes += [_ensure(context, observed, wanted, memory=True) for wanted in maps]
        _remember(context, spec, rollout_state)
        for name, replicas in rollout.in_order(
            rollout_state.plan.replicas, observed.deployment_states()
        ):
            if name not in rollout_state.stored:
                continue  # its memory is gone; the Deployment is left as it is until replaced
            gate = rollout_state.gate(name, spec)
            launch = _launch(context, spec, observed, rollout_state.stored[name])
            objects = render.revision_objects(
                spec, rollout_state.stored[name], replicas, gate, launch
            )
            disputes += [_ensure(context, observed, wanted) for wanted in objects]
        _prepare(context, spec, observed, rollout_state.preparing)
        _prune(context, spec, observed, rollout_state.plan)
        if spec.autoscaling is None and (old := observed.config_map(scale_name(spec.base))):
            apply.prune(context.kube, old, "ConfigMap")
    except NameConflict as error:
        return Condition("Accepted", "False", "NameConflict", str(error))
    except Forbidden as error:
        return Condition("Accepted", "False", "Forbidden", str(error))
    except Invalid as error:
        if "quota" in str(error):
            return Condition("Progressing", "False", "QuotaExceeded", str(error))
        return Condition("Accepted", "False", "SpecInvalid", str(error))
    return _disputed([text for text in disputes if text])


def _disputed(lasting: list[str]) -> Condition | None:
    """What somebody puts back each time that it is taken away."""
    if not lasting:
        return None
    text = "; ".join(lasting) + ": comes back each time that it is taken away, so it is left for an"
    text += " hour; pods may run with it. Stop whoever sets it, and change the InferenceService"
    return Condition("UpToDate", "False", "ForeignChange", text)


def _prepare(
    context: Context, spec: ServiceSpec, observed: Observed, wanted: prepare.Preparation | None
) -> None:
    """Makes the Job that pods wait for, once its files are there, and takes others away that still
    run; one that has ended goes by itself. A Job cannot be changed, and none is."""
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
    """A revision's launch file; what is live is read where its ControllerRevision has none."""
    if "launch" in stored["data"]:
        return render.launch_text(spec, stored, None)
    name = stored["metadata"]["name"]
    live = observed.config_map(name) or context.kube.get("ConfigMap", spec.namespace, name)
    return render.launch_text(spec, stored, live)


def _ensure(context: Context, observed: Observed, wanted: Object, memory: bool = False) -> str:
    """What is left as somebody else has it; empty, and an event, where it was taken away again."""
    kind, meta = wanted["kind"], wanted["metadata"]
    seen = observed.child(kind, meta["name"])
    absent = observed.lists(kind) or not observed.revisions
    dispute = apply.ensure(context.kube, wanted, seen, absent, memory, context.corrections)
    if dispute is None or dispute.settled:
        return dispute.text if dispute is not None else ""
    # At once: what follows may be refused, and then nobody would know who did it.
    of = meta["ownerReferences"][0]
    owner = render.Owner(meta["namespace"], of["name"], of["uid"], base_name(of["name"]))
    text = f"{dispute.text}: taken away again; change the InferenceService instead"
    said = ("ForeignChangeRemoved", "Warning", text)
    context.kube.create(render.event(owner, said, dispute.version, context.stamp()))
    return ""


def _remember(context: Context, spec: ServiceSpec, rollout_state: RolloutState) -> None:
    """Before anything is done about it: what a crash in between must not forget. Written over what
    was read alone: another operator's verdict stands, and this reconcile begins anew."""
    for name, stored in rollout_state.stored.items():
        said = revision_state.written(rollout_state.states.get(name, RevisionState()))
        if "resourceVersion" not in stored["metadata"]:  # not in the cluster yet
            apply.ensure(context.kube, render.remembered(spec, stored, said), absent=True)
        elif said != revision_state.written(revision_state.read(stored)):
            context.kube.apply(render.remembered(spec, stored, said), over=stored, exact=True)


def _prune(
    context: Context, spec: ServiceSpec, observed: Observed, plan: rollout.RolloutPlan
) -> None:
    """Old Deployments first, their ConfigMaps with them; of the revisions the newest ten stay, and
    of the pods that ended for good."""
    for kind, items in (("Deployment", observed.deployments), ("ConfigMap", observed.config_maps)):
        for item in items:
            revision = (item["metadata"].get("labels") or {}).get(LABEL_REVISION)
            if revision and revision not in plan.replicas:
                apply.prune(context.kube, item, kind)
    for pod in surplus(observed.ended):
        context.kube.delete("Pod", spec.namespace, pod.name, pod.uid)
    newest = sorted(observed.revisions, key=lambda r: r.get("revision", 0), reverse=True)
    for item in newest[revisions.KEPT :]:
        if (item["metadata"].get("labels") or {}).get(LABEL_REVISION) not in plan.replicas:
            apply.prune(context.kube, item, "ControllerRevision")


def _report(context: Context, body: Object, new: Object, news: list[status.Event]) -> None:
    """Events first, then one status write, skipped when nothing changed. An event is named after
    what it says of which version, so a repeat after a crash in between makes no second one."""
    meta = body["metadata"]
    if new == (body.get("status") or {}):
        return
    owner = render.Owner(meta["namespace"], meta["name"], meta["uid"], base_name(meta["name"]))
    for item in news:
        said = (item.reason, item.kind, item.message)
        context.kube.create(render.event(owner, said, meta["resourceVersion"], context.stamp()))
        log.info("%s/%s: %s: %s", meta["namespace"], meta["name"], item.reason, item.message)
    context.kube.replace_status(meta["namespace"], meta["name"], new, meta["resourceVersion"])


def _deadline_exceeded(observed: Observed, revision: str) -> bool:
    """Whether Kubernetes says that this revision's Deployment makes no progress. A replica
    that served and fell is no such case: its own reason is what a person must read."""
    return any(
        condition.get("reason") == "ProgressDeadlineExceeded"
        for item in observed.deployments
        if item["metadata"]["labels"].get(LABEL_REVISION) == revision
        for condition in (item.get("status") or {}).get("conditions") or []
    )


def _look_again(context: Context, state: ServiceState) -> float:
    """Soon while a replica is being measured: only its report tells how far. What else is under way
    is told by events, and looked at now and then for one that was missed."""
    if any(p.running and not p.validated for p in state.pods):
        return context.settings.poll_seconds
    again = RETRY_REFUSED if state.apply_error is not None else 0.0  # what mends it makes no event
    settled = (
        not state.plan.candidate
        and len(state.newest) == state.spec.replicas
        and all(p.ready and p.validated and not p.report_error for p in state.newest)
    )
    if not settled:
        return min(context.settings.poll_seconds * 15, context.settings.resync_seconds)
    if state.scaling is not None:
        return context.settings.load_seconds
    return again
