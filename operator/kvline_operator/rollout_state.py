"""Plan: where a service's revisions stand, and what follows. Pure: from what was observed and is
remembered to what should be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from kvline_contract.launch import GateFile
from kvline_operator import candidate, deadline, prepare, revision_state, rollout
from kvline_operator.capacity_status import CapacityStatus
from kvline_operator.gate import GateResult, Verdict, judge, thresholds
from kvline_operator.observe import Observed
from kvline_operator.revision_state import RevisionState
from kvline_operator.spec import ServiceSpec
from kvline_operator.threshold import Thresholds

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RolloutState:
    """Where a service's revisions stand, and what follows."""

    stored: dict[str, Object]  # ControllerRevisions by revision
    states: dict[str, RevisionState]  # after this reconcile
    plan: rollout.RolloutPlan
    ready: dict[str, int]
    judged: Thresholds | None  # of the wanted revision, where it is not the stable one
    preparing: prepare.Preparation | None

    @property
    def download(self) -> bool:
        """Whether pods of a revision that runs fetch their model themselves."""
        running = (self.stored[name]["data"] for name in self.plan.replicas if name in self.stored)
        return any("initContainers" in data["podTemplate"]["spec"] for data in running)

    def thresholds(self, name: str, spec: ServiceSpec) -> Thresholds:
        """A revision that was accepted must have the service's own minimum alone: whatever share of
        it is left serves better than nothing."""
        if self.judged is not None and name in (self.plan.candidate, self.plan.rejected):
            return self.judged
        return Thresholds(spec.min_kv_tokens)

    def gate(self, name: str, spec: ServiceSpec) -> GateFile:
        """A revision that serves stays open: closing takes ready pods away too."""
        verdict, is_open = self.plan.gate, True
        if verdict is not None and name in (self.plan.candidate, self.plan.rejected):
            is_open = verdict.result is GateResult.PASSED or self.ready.get(name, 0) > 0
        return self.thresholds(name, spec).gate(is_open)

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
        """Pure: from what was observed and is remembered to what should be."""
        serving = observed.serving()
        states = revision_state.without_spent(known, spec.rollout.promote)
        states = revision_state.first(states, serving, wanted)
        stable = revision_state.stable(states)
        sized = observed.deployment_states()
        verdict = judged = None
        if stable and stable != wanted:
            verdict, judged = _verdict(spec, observed, wanted, stored, states)
        situation = rollout.Situation(wanted, stable, spec.replicas, sized, verdict)
        situation = deadline.applied(situation, spec.rollout, spec.policy, states, time)
        plan = rollout.plan(situation, spec.rollout)
        preparing = None
        if plan.replicas.get(wanted):
            preparing = prepare.of(spec, observed, wanted, stable, stored, time)
        if preparing is not None and not preparing.done:
            situation = _unprepared(situation, preparing)
            plan = rollout.plan(situation, spec.rollout)
        ready = serving.get(plan.stable, ())
        after = revision_state.remember(states, plan, wanted, ready, spec.rollout.promote)
        after = deadline.remember(after, plan, situation, spec.policy, time)
        under_way = tuple(p for p in observed.pods if p.revision == wanted == plan.candidate)
        killed = candidate.kills(after[wanted].kills, under_way)
        after = {**after, wanted: replace(after[wanted], kills=killed)}
        served = [p.report for p in observed.pods if p.ready and p.revision == plan.stable]
        figures = CapacityStatus.of(served)
        if figures is not None or not served:  # ready, and its report could not be read: as it was
            after = revision_state.kept(after, plan.stable, figures, time)
        return cls(stored, after, plan, {s.revision: s.ready for s in sized}, judged, preparing)


def _unprepared(now: rollout.Situation, by: prepare.Preparation) -> rollout.Situation:
    """Its pods wait for the Job, unless there are some; and its verdict says so."""
    verdict = now.verdict
    if verdict is not None and verdict.result is GateResult.HELD and not verdict.stuck:
        verdict = replace(verdict, message=by.message, stuck=by.stuck)
    return replace(now, verdict=verdict, prepared=now.size(now.wanted) > 0)


def _verdict(
    spec: ServiceSpec,
    observed: Observed,
    wanted: str,
    stored: dict[str, Object],
    states: dict[str, RevisionState],
) -> tuple[Verdict, Thresholds]:
    """Of the candidate, with what its replicas must have: a verdict stands, but for a promotion, a
    later failure, or a policy that asks for less."""
    stable = revision_state.stable(states)
    policy = Thresholds(spec.min_kv_tokens, spec.rollout.min_capacity_percent)
    past = states[wanted].verdict_now(states[stable], policy)
    asked = spec.rollout.promote == wanted
    promoted = revision_state.promoted(states[wanted], states[stable], asked)
    promoted = promoted or (past is not None and past.promoted)
    pods = tuple(p for p in observed.pods if p.revision == wanted)
    kind, killed = revision_state.kind(stored[wanted]["data"]["inputs"]), states[wanted].kills
    seen = candidate.view(kind, pods, promoted, killed)
    proven = revision_state.proven(states[stable], stored[stable]["data"]["inputs"])
    limits = thresholds(seen, proven, policy)
    now = judge(seen, proven, policy)
    if past is None or (now.result is not GateResult.HELD and _overrules(now, past)):
        return now, limits
    return past, limits


def _overrules(now: Verdict, past: Verdict) -> bool:
    """What was promoted stays so, and what failed fails until it is promoted."""
    return not past.promoted and (past.result is GateResult.PASSED or now.promoted)
