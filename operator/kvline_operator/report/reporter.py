"""Writes the status and its events, and says when the service is looked at again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kvline_contract.names import base_name
from kvline_contract.report import State
from kvline_contract.times import stamp
from kvline_operator.api.key import Key
from kvline_operator.errors import Missing, OperatorError
from kvline_operator.kube import Kube
from kvline_operator.observe.children import Observed
from kvline_operator.observe.pods import memory_limit
from kvline_operator.plan import render
from kvline_operator.plan.service_plan import ServicePlan
from kvline_operator.report import failures, status, status_cache
from kvline_operator.report.service_state import Condition, ServiceState, newly_ended
from kvline_operator.report.status_cache import StatusCache, View
from kvline_operator.settings import Settings
from kvline_operator.store.revision_state import RevisionState

log = logging.getLogger("kvline")
Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reporter:
    kube: Kube
    settings: Settings
    cache: StatusCache
    now: Callable[[], datetime]

    def failed(self, key: Key, body: Object, error: Exception) -> float:
        """For an error before anything was written, or of the status itself; most of it stays as it
        is."""
        generation = body["metadata"].get("generation", 0)
        wrong = failures.condition(error, body.get("status") or {}, generation)
        new, events = status.refused(wrong, body, stamp(self.now()))
        self.cache.refuse(key, body.get("spec") or {}, new)
        self._write(body, new, events, error)
        return _again(error)

    def report(
        self,
        key: Key,
        body: Object,
        plan: ServicePlan,
        error: OperatorError | None,
        lasting: Sequence[str],
    ) -> float:
        """The status is of what was observed before the writes; their events requeue the service.
        `error` and `lasting` are of the writes."""
        previous = body.get("status") or {}
        wrong = failures.foreign_change(lasting)
        if error is not None:
            wrong = failures.condition(error, previous, plan.spec.generation)
        try:
            state = service_state_of(plan, wrong, self.cache.get(key))
            new, events = status.build(state, previous, stamp(self.now()))
            seconds = requeue_after(self.settings, state)
            of = plan.rollout
            history = status_cache.history(of.stored, of.states, state.phases)
        except Exception as broken:  # a mistake of ours
            return self.failed(key, body, broken)
        self.cache.put(View(key, body["spec"], new, plan.observed.pods, history))
        self._write(body, new, events, error)
        if error is not None:
            _again(error)
        return seconds

    def _write(
        self, body: Object, new: Object, events: list[status.Event], error: Exception | None
    ) -> None:
        """Events first, then one status write where the status has changed. An event's name is a
        hash of its content and the object's version, so a repeat after a crash adds none."""
        meta = body["metadata"]
        try:
            self._write_events(meta, events)
            if new != (body.get("status") or {}):
                version = meta["resourceVersion"]
                self.kube.replace_status(meta["namespace"], meta["name"], new, version)
        except Missing:
            log.info("%s/%s was deleted meanwhile", meta["namespace"], meta["name"])
        except OperatorError as refused:
            if error is not None:  # the first cause, which the status would have had
                log.warning("%s/%s: %s", meta["namespace"], meta["name"], error)
            if failures.is_refusal(refused):
                text = f"the status is not written: {failures.headline(refused)}"
                self._write_events(meta, [status.Event("StatusNotWritten", "Warning", text)])
            raise

    def _write_events(self, meta: Object, events: list[status.Event]) -> None:
        """What refuses an event, such as a webhook, keeps no status back."""
        for item in events:
            log.info("%s/%s: %s: %s", meta["namespace"], meta["name"], item.reason, item.message)
            event = (item.reason, item.kind, item.message)
            made = render.event(_owner(meta), event, meta["resourceVersion"], stamp(self.now()))
            try:
                self.kube.create(made)
            except OperatorError as error:
                if failures.loses_events(error):  # the next try writes both
                    raise
                log.warning("no event %s: %s", item.reason, error)


def _owner(meta: Object) -> render.Owner:
    return render.Owner(meta["namespace"], meta["name"], meta["uid"], base_name(meta["name"]))


def _again(error: Exception) -> float:
    """Seconds to the next try; raises what the queue tries again sooner, with a growing delay."""
    seconds = failures.retry_seconds(error)
    if not seconds:
        raise error
    return seconds


def service_state_of(
    plan: ServicePlan, wrong: Condition | None, before: View | None
) -> ServiceState:
    observed, rollout = plan.observed, plan.rollout
    stable, newest = rollout.plan.stable, rollout.plan.newest
    return ServiceState(
        spec=plan.spec,
        plan=rollout.plan,
        pods=observed.pods,
        ended=observed.ended,
        phases=rollout.phases,
        stable_state=rollout.states.get(stable, RevisionState()),
        limits=rollout.thresholds(newest, plan.spec),
        image_outdated=plan.image_outdated,
        records=plan.records,
        apply_error=wrong,
        deadline_exceeded=_deadline_exceeded(observed, newest),
        refused=observed.refused(newest),
        scaling=plan.scaling,
        preparing=rollout.preparing,
        memory_limits={name: _memory_limit(kept) for name, kept in rollout.stored.items()},
        stable_data=rollout.stored.get(stable, {}).get("data", {}),
        newly_ended=newly_ended(observed.pods, before.pods if before is not None else ()),
    )


def _memory_limit(revision: Object) -> str:
    template = revision.get("data", {}).get("podTemplate") or {}
    return memory_limit(template.get("spec") or {})


def _deadline_exceeded(observed: Observed, revision: str) -> bool:
    """Whether this revision's Deployment reports ProgressDeadlineExceeded. It does not for a
    replica that was ready before: that one has its own reason."""
    found = observed.deployment_status(revision).get("conditions") or []
    return any(condition.get("reason") == "ProgressDeadlineExceeded" for condition in found)


def requeue_after(settings: Settings, state: ServiceState) -> float:
    """Seconds until the next poll: short while a replica is being measured, whose progress is only
    in its sizing report; longer while anything else is in progress, in case an event is missed; 0
    for none."""
    measured = [p.report for p in state.pods if p.running and not p.validated]
    if measured:
        validating = any(r is not None and r.state is State.VALIDATING for r in measured)
        outage = state.plan.candidate and not any(p.ready for p in state.pods)
        # The verdict that is near ends it, whatever it is.
        return settings.poll_seconds / (4 if validating and outage else 1)
    settled = (
        (not state.plan.candidate or not state.spec.replicas)
        and len(state.newest) == state.spec.replicas
        and all(p.ready and p.validated and not p.report_error for p in state.newest)
    )
    if not settled:
        return min(settings.poll_seconds * 30, settings.resync_seconds)
    if state.scaling is not None:
        return settings.load_seconds
    return failures.MINUTE if state.apply_error is not None else 0.0
