"""The rollout of a service, from observed objects and stored revision states. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import Any

from kvline_contract.launch import GateFile
from kvline_operator.api.spec import ServiceSpec
from kvline_operator.observe import trouble
from kvline_operator.observe.children import Observed
from kvline_operator.observe.pods import PodView
from kvline_operator.plan import acceptance, candidate, deadline, podspec, prepare, rollout
from kvline_operator.plan.gate import evaluate, thresholds
from kvline_operator.plan.phase import Policy, current_verdict, phases
from kvline_operator.plan.threshold import Thresholds
from kvline_operator.plan.trade import Asked
from kvline_operator.store import revision_state
from kvline_operator.store.capacity_status import CapacityStatus
from kvline_operator.store.revision_state import RevisionState
from kvline_operator.store.verdict import GateResult, Phase, Verdict

Object = dict[str, Any]
KEPT_OUT = {Phase.MEASURING, Phase.HELD, Phase.REJECTED, Phase.EXPIRED}  # of traffic


@dataclass(frozen=True)  # no slots: what is derived is kept
class RolloutState:
    """The revisions of a service after this reconcile, and the plan for their Deployments."""

    stored: dict[str, Object]  # ControllerRevisions by revision
    states: dict[str, RevisionState]
    policy: Policy
    plan: rollout.RolloutPlan
    ready: dict[str, int]  # ready replicas by revision
    limits: Thresholds | None  # of the spec's revision, where it is not the stable one
    preparing: prepare.Preparation | None

    @cached_property
    def phases(self) -> dict[str, Phase]:
        """By revision."""
        names = self.plan.candidate, self.plan.rejected
        now: dict[str, Verdict | None] = dict.fromkeys(names, self.plan.gate)
        return phases(self.states, self.policy, now)

    @property
    def hub_ports(self) -> list[int]:
        """Those that pods of running revisions download their model from themselves."""
        running = (self.stored[name]["data"] for name in self.plan.replicas if name in self.stored)
        pods = (data["podTemplate"]["spec"] for data in running)
        loads = (container for pod in pods for container in pod.get("initContainers", []))
        return sorted(set().union(*map(podspec.hub_ports, loads)))

    def thresholds(self, name: str, spec: ServiceSpec) -> Thresholds:
        """For an accepted revision the minimums of spec.capacity alone: a smaller replica serves
        better than none."""
        if self.limits is not None and name in (self.plan.candidate, self.plan.rejected):
            return self.limits
        return Thresholds.minimums(spec.min_kv_tokens, spec.min_sequences)

    def is_open(self, name: str) -> bool:
        """Whether the gate of a revision is. It stays open while replicas are ready, because
        closing it would make them unready."""
        return self.phases.get(name) not in KEPT_OUT or self.ready.get(name, 0) > 0

    def gate(self, name: str, spec: ServiceSpec, digest: str | None = None) -> GateFile:
        """The gate file of a revision; `digest`: of the token in notices to its pods."""
        made = self.thresholds(name, spec).gate(self.is_open(name))
        return replace(made, token_sha256=digest)

    def to_notify(self, pods: tuple[PodView, ...]) -> list[PodView]:
        """Validated pods that are not ready although their gate file, which was written in this
        reconcile, is open."""
        unready = [p for p in pods if p.validated and p.running and not p.ready and p.address]
        written = {name for name, count in self.plan.replicas.items() if count}
        kept = [p for p in unready if p.revision in written & self.stored.keys()]
        return [p for p in kept if self.is_open(p.revision)]

    @classmethod
    def of(
        cls,
        spec: ServiceSpec,
        observed: Observed,
        wanted: str,
        stored: dict[str, Object],
        known: dict[str, RevisionState],
        time: datetime,
    ) -> RolloutState:
        serving, unread = observed.serving(), observed.unread()
        states = acceptance.without_used_promotions(known, spec.rollout.promote)
        states = acceptance.accept_first(states, serving, wanted, unread)
        stable = revision_state.stable(states)
        sized = observed.deployment_states
        policy = Policy.of(spec)
        verdict = limits = None
        if stable and stable != wanted:
            verdict, limits = _verdict(spec, observed, wanted, stored, states)
        situation = rollout.Situation(wanted, stable, spec.replicas, sized, verdict)
        situation = deadline.with_deadline(situation, spec.rollout, policy, states, time)
        plan = rollout.plan(situation, spec.rollout)
        preparing = None
        if plan.replicas.get(wanted):
            preparing = prepare.of(spec, observed, wanted, stable, stored, time)
        if preparing is not None and not preparing.done:
            situation = _unprepared(situation, preparing)
            plan = rollout.plan(situation, spec.rollout)
        ready = serving.get(plan.stable, ())
        promote, read = spec.rollout.promote, plan.stable not in unread
        asked = Asked.of(spec.inputs)
        after = acceptance.updated(states, plan, wanted, ready, promote, read, limits, asked)
        after = deadline.updated(after, plan, situation, policy, time)
        served = [p.report for p in observed.pods if p.ready and p.revision == plan.stable]
        capacity = CapacityStatus.of(served)
        if capacity is not None or not served:  # else ready, but no report could be read
            after = acceptance.with_capacity(after, plan.stable, capacity, time)
        counts = {s.revision: s.ready for s in sized}
        return cls(stored, after, policy, plan, counts, limits, preparing)


def _unprepared(now: rollout.Situation, by: prepare.Preparation) -> rollout.Situation:
    """No pods before the Job is done, unless there are some already; the verdict names the Job."""
    verdict = now.verdict
    if verdict is not None and verdict.phase is Phase.MEASURING:
        verdict = replace(verdict, message=by.message, blocked=by.blocked)
    return replace(now, verdict=verdict, prepared=now.size(now.wanted) > 0)


def _verdict(
    spec: ServiceSpec,
    observed: Observed,
    wanted: str,
    stored: dict[str, Object],
    states: dict[str, RevisionState],
) -> tuple[Verdict, Thresholds]:
    """The candidate's verdict and thresholds. A stored verdict stands until the candidate is
    promoted, fails later, or the spec requires less."""
    stable = revision_state.stable(states)
    policy = Policy.of(spec).thresholds
    past = current_verdict(states[wanted], states[stable], policy)
    asked = spec.rollout.promote == wanted
    pods = tuple(p for p in observed.pods if p.revision == wanted)
    measured = any(p.measured is not None for p in pods)
    refused = acceptance.promotion_refused(states[wanted], measured) if asked else ""
    promoted = (asked and not refused) or (past is not None and past.promoted)
    inputs = stored[wanted]["data"]["inputs"]
    group = acceptance.comparison_group(inputs)
    ended = tuple(p for p in observed.ended if p.revision == wanted)
    lacks = trouble.of_refusals(observed.refused(wanted), pods, ended, group.gpus > 0)
    seen = replace(candidate.view(group, pods, promoted, lacks), asked=Asked.of(inputs))
    baseline = acceptance.baseline_of(states[stable], stored[stable]["data"]["inputs"])
    limits = thresholds(seen, baseline, policy)
    now = evaluate(seen, baseline, policy)
    if past is not None and (now.result is GateResult.HELD or not _overrules(now, past)):
        now = past
    if now.result is not GateResult.PASSED:
        now = replace(now, promotion_refused=refused)
    return now, limits


def _overrules(now: Verdict, past: Verdict) -> bool:
    """Whether a new verdict replaces a stored one: a promotion is final, a rejection until it."""
    return not past.promoted and (past.result is GateResult.PASSED or now.promoted)
