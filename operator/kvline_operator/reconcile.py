"""The story of one reconcile: read, parse, observe, plan, apply, report.

Can run twice, half-way, late or on stale data, and never needs to know which event woke it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kvline_contract.launch import Record
from kvline_contract.names import KIND, LABEL_REVISION, base_name, records_name
from kvline_operator import apply, conditions, records, render, revisions, rollout, status
from kvline_operator.errors import Forbidden, Invalid, NameConflict, SpecError
from kvline_operator.kube import Kube
from kvline_operator.observe import Observed, observe
from kvline_operator.settings import Settings
from kvline_operator.sizing import Reports
from kvline_operator.spec import ServiceSpec, parse
from kvline_operator.workqueue import Key

log = logging.getLogger("kvline")
Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class World:
    """What a reconcile works with; one for the process."""

    kube: Kube
    settings: Settings
    reports: Reports
    pool: ThreadPoolExecutor
    now: Callable[[], datetime] = lambda: datetime.now(UTC)

    def stamp(self) -> str:
        return self.now().strftime("%Y-%m-%dT%H:%M:%SZ")


def reconcile(world: World, key: Key) -> float:
    """Brings one service a step closer; returns in how many seconds to look again."""
    body = world.kube.get(KIND, key.namespace, key.name)
    if body is None or body["metadata"].get("deletionTimestamp"):
        return 0.0  # owner references clean up; nothing is ours to do
    try:
        spec = parse(body)
        observed = _observe(world, spec)
        revision, stored = _revision(spec, observed, world.settings)
    except SpecError as error:
        wrong = conditions.Condition("Accepted", "False", "SpecInvalid", str(error))
        _report(world, body, *status.refused(wrong, body, world.stamp()))
        return world.settings.resync_seconds
    plan = rollout.plan(revision.name, spec.replicas, observed.sized())
    kept = _records(spec, observed)
    refusal = _apply(world, spec, observed, stored, plan, kept)
    # What was observed before the writes is told: the events of the writes wake this key again.
    facts = conditions.Facts(
        spec=spec,
        plan=plan,
        pods=observed.pods,
        records=kept,
        apply_error=refusal,
        deadline_exceeded=_deadline_exceeded(observed, revision.name),
    )
    _report(world, body, *status.build(facts, body.get("status") or {}, world.stamp()))
    return _look_again(world, facts)


def _observe(world: World, spec: ServiceSpec) -> Observed:
    return observe(world.kube, spec.namespace, spec.base, spec.uid, world.reports, world.pool)


def _revision(
    spec: ServiceSpec, observed: Observed, settings: Settings
) -> tuple[revisions.Revision, dict[str, Object]]:
    """The revision the spec means, and every stored ControllerRevision by revision name."""
    stored = {
        item["metadata"]["labels"][LABEL_REVISION]: item
        for item in observed.revisions
        if LABEL_REVISION in (item["metadata"].get("labels") or {})
    }
    existing = revisions.known(list(stored.values()))
    wanted = revisions.wanted(spec, existing, settings.image_for(spec.gpus))
    if wanted.name not in stored:
        stored[wanted.name] = render.controller_revision(spec, wanted, settings)
    return wanted, stored


def _records(spec: ServiceSpec, observed: Observed) -> dict[str, Record]:
    """The sizes on record, and those that replicas have found since."""
    kept = records.read(observed.config_map(records_name(spec.base)))
    return records.merge(kept, [p.result for p in observed.pods if p.result is not None])


def _apply(
    world: World,
    spec: ServiceSpec,
    observed: Observed,
    stored: dict[str, Object],
    plan: rollout.RolloutPlan,
    kept: dict[str, Record],
) -> conditions.Condition | None:
    """Writes what differs, then prunes. A refusal that a person must see becomes a condition."""
    try:
        for wanted in render.service_objects(spec, world.settings):
            apply.ensure(world.kube, wanted)
        if kept:
            apply.ensure(world.kube, render.records_map(spec, kept))
        for name, replicas in plan.replicas.items():
            if name not in stored:
                continue  # its memory is gone; the Deployment is left as it is until replaced
            if "resourceVersion" not in stored[name]["metadata"]:  # not in the cluster yet
                apply.ensure(world.kube, stored[name])
            for wanted in render.revision_objects(spec, stored[name], replicas, world.settings):
                apply.ensure(world.kube, wanted)
        _prune(world, observed, plan)
    except NameConflict as error:
        return conditions.Condition("Accepted", "False", "NameConflict", str(error))
    except Forbidden as error:
        return conditions.Condition("Accepted", "False", "Forbidden", str(error))
    except Invalid as error:
        if "quota" in str(error):
            return conditions.Condition("Progressing", "False", "QuotaExceeded", str(error))
        return conditions.Condition("Accepted", "False", "SpecInvalid", str(error))
    return None


def _prune(world: World, observed: Observed, plan: rollout.RolloutPlan) -> None:
    """Old Deployments first, their ConfigMaps with them; of the revisions the newest ten stay."""
    for kind, items in (("Deployment", observed.deployments), ("ConfigMap", observed.config_maps)):
        for item in items:
            revision = (item["metadata"].get("labels") or {}).get(LABEL_REVISION)
            if revision and revision not in plan.replicas:
                apply.prune(world.kube, item, kind)
    newest = sorted(observed.revisions, key=lambda r: r.get("revision", 0), reverse=True)
    for item in newest[revisions.KEPT :]:
        if (item["metadata"].get("labels") or {}).get(LABEL_REVISION) not in plan.replicas:
            apply.prune(world.kube, item, "ControllerRevision")


def _report(world: World, body: Object, new: Object, news: list[status.Event]) -> None:
    """Events first, then one status write, skipped when nothing changed. An event is named after
    what it says of which version, so a repeat after a crash in between makes no second one."""
    meta = body["metadata"]
    if new == (body.get("status") or {}):
        return
    owner = render.Owner(meta["namespace"], meta["name"], meta["uid"], base_name(meta["name"]))
    for item in news:
        said = (item.reason, item.kind, item.message)
        world.kube.create(render.event(owner, said, meta["resourceVersion"], world.stamp()))
        log.info("%s/%s: %s: %s", meta["namespace"], meta["name"], item.reason, item.message)
    world.kube.replace_status(meta["namespace"], meta["name"], new, meta["resourceVersion"])


def _deadline_exceeded(observed: Observed, revision: str) -> bool:
    """Whether Kubernetes says that the newest revision's Deployment makes no progress. A replica
    that served and fell is no such case: its own reason is what a person must read."""
    return any(
        condition.get("reason") == "ProgressDeadlineExceeded"
        for item in observed.deployments
        if item["metadata"]["labels"].get(LABEL_REVISION) == revision
        for condition in (item.get("status") or {}).get("conditions") or []
    )


def _look_again(world: World, facts: conditions.Facts) -> float:
    """Soon while a replica is on its way, else at resync; events wake the key in between."""
    settled = (
        not facts.plan.candidate
        and len(facts.newest) == facts.spec.replicas
        and all(p.ready and p.validated for p in facts.newest)
    )
    return world.settings.resync_seconds if settled else world.settings.poll_seconds
