"""The story of one reconcile: read, parse, observe, plan, apply, report.

Can run twice, half-way, late or on stale data, and never needs to know which event woke it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from kvline_contract.launch import VERSION, GateFile, Record
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
    candidate,
    conditions,
    records,
    render,
    revisions,
    rollout,
    status,
    verdicts,
)
from kvline_operator.board import Board, View, past
from kvline_operator.errors import Forbidden, Invalid, NameConflict, SpecError
from kvline_operator.gate import Outcome, Verdict, judge
from kvline_operator.kube import Kube
from kvline_operator.observe import Observed, observe
from kvline_operator.settings import Settings
from kvline_operator.sizing import Reports
from kvline_operator.spec import ServiceSpec, parse
from kvline_operator.verdicts import Standing
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
    board: Board
    now: Callable[[], datetime] = lambda: datetime.now(UTC)

    def stamp(self) -> str:
        return self.now().strftime("%Y-%m-%dT%H:%M:%SZ")


def reconcile(world: World, key: Key) -> float:
    """Brings one service a step closer; returns in how many seconds to look again, 0 for when
    something changes."""
    body = world.kube.get(KIND, key.namespace, key.name)
    if body is None or body["metadata"].get("deletionTimestamp"):
        world.board.drop(key)
        return 0.0  # owner references clean up; nothing is ours to do
    try:
        spec = parse(body)
        observed = observe(world.kube, spec, world.reports, world.pool)
        scale, scaling = _scale(spec, observed, world.now())
        spec = replace(spec, replicas=scale.replicas) if scale else spec
        revision, stored, known = _revision(spec, observed, world.settings)
    except SpecError as error:
        wrong = conditions.Condition("Accepted", "False", "SpecInvalid", str(error))
        said, news = status.refused(wrong, body, world.stamp())
        world.board.refuse(key, body.get("spec") or {}, said)
        _report(world, body, said, news)
        return 0.0
    story = _story(spec, observed, revision.name, stored, known)
    kept = _records(spec, observed)
    maps = [render.records_map(spec, kept)] if kept else []
    maps += [render.scale_map(spec, scale)] if scale else []
    refusal = _apply(world, spec, observed, story, maps)
    # What was observed before the writes is told: the events of the writes wake this key again.
    facts = conditions.Facts(
        spec=spec,
        plan=story.plan,
        pods=observed.pods,
        standing=story.standings.get(story.plan.stable, Standing()),
        image_outdated=_image_outdated(spec, story, world.settings),
        records=kept,
        apply_error=refusal,
        deadline_exceeded=_deadline_exceeded(observed, revision.name),
        scaling=scaling,
    )
    said, news = status.build(facts, body.get("status") or {}, world.stamp())
    history = past(story.stored, story.standings)
    world.board.put(View(key, body["spec"], said, observed.pods, history))
    _report(world, body, said, news)
    return _look_again(world, facts)


def _scale(
    spec: ServiceSpec, observed: Observed, now: datetime
) -> tuple[autoscale.Scale | None, conditions.Scaling | None]:
    """The replicas that the load asks for, to be remembered, and what is said of it."""
    how, ready = spec.autoscaling, [p.load for p in observed.pods if p.ready]
    if how is None:
        return None, None
    kept = observed.config_map(scale_name(spec.base)) or {}
    before = autoscale.Scale.parse((kept.get("data") or {}).get(SCALE_FILE))
    asked = autoscale.demand(ready, how.target_percent)
    existing = sum(s.replicas for s in observed.sized())
    after = autoscale.decide(before, existing, asked, how, now)
    reason, text = autoscale.activity(after, asked, how, len(ready))
    return after, conditions.Scaling(reason, text, after.replicas, after.why)


def _revision(
    spec: ServiceSpec, observed: Observed, settings: Settings
) -> tuple[revisions.Revision, dict[str, Object], dict[str, Standing]]:
    """The revision the spec means; by revision name every ControllerRevision, its own among them,
    and what is remembered of each."""
    stored = {
        item["metadata"]["labels"][LABEL_REVISION]: item
        for item in observed.revisions
        if LABEL_REVISION in (item["metadata"].get("labels") or {})
    }
    existing = revisions.known(list(stored.values()))
    known = {name: verdicts.read(item) for name, item in stored.items()}
    stable = verdicts.stable(known)
    wanted = revisions.wanted(spec, existing, settings.image_for(spec.gpus), stable)
    if wanted.name not in stored:
        stored[wanted.name] = render.controller_revision(spec, wanted, settings)
        known[wanted.name] = Standing()
    return wanted, stored, known


@dataclass(frozen=True, slots=True)
class Story:
    """Where a service's revisions stand, and what follows."""

    stored: dict[str, Object]  # ControllerRevisions by revision
    standings: dict[str, Standing]  # after this reconcile
    plan: rollout.RolloutPlan
    ready: dict[str, int]

    def gate(self, name: str, spec: ServiceSpec) -> GateFile:
        """A revision that serves stays open: closing takes ready pods away too."""
        verdict, required = self.plan.gate, self.standings.get(name, Standing()).required
        is_open = True
        if verdict is not None and name in (self.plan.candidate, self.plan.rejected):
            is_open = verdict.outcome is Outcome.PASS or self.ready.get(name, 0) > 0
            required = verdict.required
        return GateFile(VERSION, is_open, spec.min_kv_tokens, required)


def _story(
    spec: ServiceSpec,
    observed: Observed,
    wanted: str,
    stored: dict[str, Object],
    known: dict[str, Standing],
) -> Story:
    """Pure: from what was observed and is remembered to what should be."""
    serving = observed.serving()
    standings = verdicts.first(known, serving, wanted)
    stable = verdicts.stable(standings)
    sized = observed.sized()
    verdict = None
    if stable and stable != wanted:
        verdict = _verdict(spec, observed, wanted, stored, standings)
    situation = rollout.Situation(wanted, stable, spec.replicas, sized, verdict)
    plan = rollout.plan(situation, spec.rollout)
    ready = serving.get(plan.stable, ())
    after = verdicts.remember(standings, plan, wanted, ready, spec.rollout.promote)
    return Story(stored, after, plan, {s.revision: s.ready for s in sized})


def _verdict(
    spec: ServiceSpec,
    observed: Observed,
    wanted: str,
    stored: dict[str, Object],
    standings: dict[str, Standing],
) -> Verdict:
    """Of the candidate: what was said of it stands, but for a promotion or a later failure."""
    stable = verdicts.stable(standings)
    past = standings[wanted].verdict_now(standings[stable])
    asked = spec.rollout.promote == wanted
    promoted = verdicts.promoted(standings[wanted], standings[stable], asked)
    if past is not None and (past.promoted or (past.outcome is Outcome.FAIL and not promoted)):
        return past
    pods = tuple(p for p in observed.pods if p.revision == wanted)
    seen = candidate.view(verdicts.kind(stored[wanted]["data"]["inputs"]), pods, promoted)
    proven = verdicts.proven(standings[stable], stored[stable]["data"]["inputs"])
    now = judge(seen, proven, spec.min_kv_tokens, spec.rollout.min_capacity_percent)
    return past if past is not None and now.outcome is Outcome.HOLD else now


def _image_outdated(spec: ServiceSpec, story: Story, settings: Settings) -> bool:
    stored = story.stored.get(story.plan.stable)
    default = settings.image_for(spec.gpus)
    return bool(stored and default and not spec.image and stored["data"]["image"] != default)


def _records(spec: ServiceSpec, observed: Observed) -> dict[str, Record]:
    """The sizes on record, and those that replicas have found since."""
    kept = records.read(observed.config_map(records_name(spec.base)))
    return records.merge(kept, [p.result for p in observed.pods if p.result is not None])


def _apply(
    world: World,
    spec: ServiceSpec,
    observed: Observed,
    story: Story,
    maps: list[Object],
) -> conditions.Condition | None:
    """Writes what differs, then prunes. A refusal that a person must see becomes a condition."""
    try:
        for wanted in [*render.service_objects(spec, world.settings), *maps]:
            _ensure(world, observed, wanted)
        _remember(world, spec, story)
        for name, replicas in story.plan.replicas.items():
            if name not in story.stored:
                continue  # its memory is gone; the Deployment is left as it is until replaced
            gate = story.gate(name, spec)
            for wanted in render.revision_objects(spec, story.stored[name], replicas, gate):
                _ensure(world, observed, wanted)
        _prune(world, observed, story.plan)
        if spec.autoscaling is None and (old := observed.config_map(scale_name(spec.base))):
            apply.prune(world.kube, old, "ConfigMap")
    except NameConflict as error:
        return conditions.Condition("Accepted", "False", "NameConflict", str(error))
    except Forbidden as error:
        return conditions.Condition("Accepted", "False", "Forbidden", str(error))
    except Invalid as error:
        if "quota" in str(error):
            return conditions.Condition("Progressing", "False", "QuotaExceeded", str(error))
        return conditions.Condition("Accepted", "False", "SpecInvalid", str(error))
    return None


def _ensure(world: World, observed: Observed, wanted: Object) -> None:
    kind = wanted["kind"]
    seen = observed.child(kind, wanted["metadata"]["name"])
    apply.ensure(world.kube, wanted, seen, absent=observed.lists(kind) or not observed.revisions)


def _remember(world: World, spec: ServiceSpec, story: Story) -> None:
    """Before anything is done about it: what a crash in between must not forget."""
    for name, stored in story.stored.items():
        said = verdicts.written(story.standings.get(name, Standing()))
        if "resourceVersion" not in stored["metadata"]:  # not in the cluster yet
            apply.ensure(world.kube, render.remembered(spec, stored, said), absent=True)
        elif said != verdicts.written(verdicts.read(stored)):
            world.kube.apply(render.remembered(spec, stored, said))


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
    """Soon while a replica is being measured: only its report tells how far. What else is under way
    is told by events, and looked at now and then for one that was missed."""
    if any(p.running and not p.validated for p in facts.pods):
        return world.settings.poll_seconds
    settled = (
        not facts.plan.candidate
        and len(facts.newest) == facts.spec.replicas
        and all(p.ready and p.validated and not p.report_error for p in facts.newest)
    )
    if not settled:
        return min(world.settings.poll_seconds * 15, world.settings.resync_seconds)
    if facts.scaling is not None:
        return world.settings.load_seconds
    return 0.0
