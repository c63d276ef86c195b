"""All that one reconcile decides about a service, from its spec and what was observed. Pure."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from kvline_contract.codec import ContractError
from kvline_contract.launch import Record, Reuse
from kvline_contract.names import SCALE_FILE, records_name, revision_of, scale_name
from kvline_contract.times import stamp
from kvline_operator.api.spec import ServiceSpec
from kvline_operator.observe.children import Observed
from kvline_operator.observe.ownership import is_owned
from kvline_operator.plan import autoscale, candidate, phase, render, replicas, revisions
from kvline_operator.plan.autoscale import Scale, Scaling
from kvline_operator.plan.rollout_state import RolloutState
from kvline_operator.settings import Settings
from kvline_operator.store import records, revision_state
from kvline_operator.store.revision_state import RevisionState

log = logging.getLogger("kvline")
Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ServicePlan:
    spec: ServiceSpec  # with the replicas that the autoscaler wants
    observed: Observed
    rollout: RolloutState
    records: dict[str, Record]  # recorded sizes, by fingerprint
    image_outdated: bool
    scale: Scale | None  # None where autoscaling is off, as is `scaling`
    scaling: Scaling | None
    objects: tuple[Object, ...]  # that exist once for a service
    maps: tuple[Object, ...]  # ConfigMaps that only this operator reads and writes
    # ControllerRevisions to write, each with the version that it is written over; None: a new one
    revisions: tuple[tuple[Object, Object | None], ...]

    @classmethod
    def of(
        cls, spec: ServiceSpec, observed: Observed, settings: Settings, now: datetime
    ) -> ServicePlan:
        """Raises SpecError where no revision can be made of the spec."""
        scale, scaling = _scale(spec, observed, now)
        spec = replace(spec, replicas=scale.replicas) if scale else spec
        default = settings.image_for(spec.gpus)
        revision, stored, known = _revision(spec, observed, settings, default)
        known, pods = candidate.counted(known, observed.pods)
        observed = replace(observed, pods=pods)
        rollout = RolloutState.of(spec, observed, revision.name, stored, known, now)
        outdated = _image_outdated(spec, rollout, default)
        recorded = _records(spec, observed)
        budget = render.disruption_budget(spec, rollout.plan)
        return cls(
            spec=spec,
            observed=observed,
            rollout=rollout,
            records=recorded,
            image_outdated=outdated,
            scale=scale,
            scaling=scaling,
            objects=(*render.service_objects(spec, settings, rollout.hub_ports), budget),
            maps=_maps(spec, recorded, scale),
            revisions=tuple(_changed(spec, rollout)),
        )

    @property
    def replicas_to_write(self) -> int | None:
        """For spec.replicas, from the autoscaler; None where it stays as it is."""
        seen = self.spec.replicas_field
        return replicas.replicas_to_write(self.scale, seen) if self.scale else None


def _maps(
    spec: ServiceSpec, recorded: dict[str, Record], scale: Scale | None
) -> tuple[Object, ...]:
    # With Never it is there before the first pod, which would start again from its own record.
    wanted = recorded or spec.reuse is Reuse.NEVER
    maps = [render.records_map(spec, recorded)] if wanted else []
    return (*maps, *([render.scale_map(spec, scale)] if scale else []))


def _changed(spec: ServiceSpec, rollout: RolloutState) -> Iterator[tuple[Object, Object | None]]:
    for name, stored in rollout.stored.items():
        state = rollout.states.get(name) or RevisionState()
        is_new = "resourceVersion" not in stored["metadata"]
        kept = is_owned(stored, spec.uid) and revision_state.is_stored(state, stored)
        if is_new or not kept:
            annotations = revision_state.to_annotations(state)
            wanted = render.with_annotations(spec, stored, annotations)
            yield wanted, None if is_new else stored


def _scale(
    spec: ServiceSpec, observed: Observed, now: datetime
) -> tuple[Scale | None, Scaling | None]:
    """The autoscaler's decision, which is stored, and ScalingActive; None where it is off."""
    policy, ready = spec.autoscaling, [p.load for p in observed.pods if p.ready]
    if policy is None:
        return None, None
    stored = observed.config_map(scale_name(spec.base)) or {}
    before = Scale.parse((stored.get("data") or {}).get(SCALE_FILE))
    demand = autoscale.demand(ready, policy.target_percent)
    existing = sum(s.replicas for s in observed.deployment_states)
    minute_ago = stamp(now - autoscale.STEP)
    settled = sum(1 for p in observed.pods if p.ready and p.ready_since <= minute_ago)
    after = autoscale.decide(before, existing, demand, policy, now, settled)
    after = replicas.observe_writers(after, before, spec.replicas_field, now)
    second = replicas.second_writer(after, now)
    reason, text = autoscale.activity(after, demand, policy, len(ready), second)
    return after, Scaling(reason, text, after.replicas, after.why)


def _revision(
    spec: ServiceSpec, observed: Observed, settings: Settings, default: str
) -> tuple[revisions.Revision, dict[str, Object], dict[str, RevisionState]]:
    """The revision of the current spec; all ControllerRevisions by revision, including a new one
    that is not written yet; and the stored state of each."""
    stored = {name: item for item in observed.revisions if (name := revision_of(item))}
    known = {name: revision_state.read(item) for name, item in stored.items()}
    existing = revisions.known(list(stored.values()), known)
    stable = revision_state.stable(known)
    wanted = revisions.wanted(spec, existing, default, stable, phase.tried(known))
    if wanted.name not in stored:
        stored[wanted.name] = render.controller_revision(spec, wanted, settings)
        known[wanted.name] = RevisionState()
    return wanted, stored, known


def _image_outdated(spec: ServiceSpec, rollout: RolloutState, default: str) -> bool:
    stored = rollout.stored.get(rollout.plan.stable)
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
