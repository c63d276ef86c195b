"""Which revision is accepted, its verdict and its baseline. Pure."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

from kvline_contract.launch import KVCacheDtype
from kvline_contract.times import stamp
from kvline_operator.api.source import source_of
from kvline_operator.api.spec import gpus, ranks
from kvline_operator.observe.pods import Measured
from kvline_operator.plan.gate import Baseline, ComparisonGroup
from kvline_operator.plan.rollout import RolloutPlan
from kvline_operator.store.capacity_status import CapacityStatus, retained
from kvline_operator.store.revision_state import RevisionState, stable
from kvline_operator.store.verdict import GateResult, StoredVerdict, Verdict

Object = dict[str, Any]


def promoted(state: RevisionState, stable: RevisionState, asked: bool) -> bool:
    """Whether annotation kvline.dev/promote accepts the revision now. It does so once: after
    another revision has been accepted it must be removed and set again."""
    used = is_promoted(state) and state.against(stable) is None
    return asked and not used


def is_promoted(state: RevisionState) -> bool:
    return state.verdict is not None and state.verdict.promoted


def without_used_promotions(
    states: dict[str, RevisionState], promote: str
) -> dict[str, RevisionState]:
    """Drops promotions that expired and whose annotation was removed: they may be made again."""
    return {
        name: replace(s, verdict=None) if is_promoted(s) and s.expiry and name != promote else s
        for name, s in states.items()
    }


def comparison_group(inputs: Object) -> ComparisonGroup:
    resources, engine = inputs["resources"], inputs.get("engine", {})
    return ComparisonGroup(
        source_of(inputs["model"]).identity,
        gpus(resources),
        ranks(resources),
        engine.get("kvCacheDtype", KVCacheDtype.AUTO),
    )


def baseline_of(state: RevisionState, inputs: Object) -> Baseline:
    return Baseline(comparison_group(inputs), state.bytes_per_token, state.baseline)


def accept_first(
    states: dict[str, RevisionState], measured: dict[str, tuple[Measured, ...]], wanted: str
) -> dict[str, RevisionState]:
    """Accepts the first revision that serves, where none is accepted yet; also what an operator
    without gates left behind."""
    serving = [name for name in measured if name in states]
    if stable(states) or not serving:
        return states
    name = wanted if wanted in serving else max(serving, key=lambda n: len(measured[n]))
    begun = _with_raised_baseline(replace(states[name], accepted=1), measured[name])
    return {**states, name: begun}


def updated(
    states: dict[str, RevisionState],
    plan: RolloutPlan,
    wanted: str,
    serving: tuple[Measured, ...],
    promote: str = "",
) -> dict[str, RevisionState]:
    """All states after this reconcile. `serving` are the ready replicas of plan.stable, `promote`
    is the value of annotation kvline.dev/promote."""
    out = dict(states)
    before = stable(states)
    if not before:
        return out
    for name, state in states.items():
        if state.verdict is None:
            continue
        if name != wanted and state.verdict.result is GateResult.REJECTED:
            # A rejection holds while the spec asks for the revision. Afterwards it is history, and
            # the same spec applied again is measured again.
            out[name] = replace(state, verdict=replace(state.verdict, against=0))
        waits = name == wanted and name != plan.stable
        if name != promote and not waits and state.verdict.promoted:  # it may be promoted again
            out[name] = replace(state, verdict=replace(state.verdict, promoted=False))
    if plan.gate is not None and plan.gate.result is not GateResult.HELD:
        stored = StoredVerdict.of(plan.gate, states[before].accepted)
        out[wanted] = replace(out[wanted], verdict=stored)
    if plan.stable != before and serving:
        out[plan.stable] = _accepted(out[plan.stable], plan, states[before])
    elif serving and promote == plan.stable and not is_promoted(out[promote]):
        out[promote] = _with_new_baseline(out[promote], serving)
    if serving:
        out[plan.stable] = _with_raised_baseline(out[plan.stable], serving)
    return out


def with_capacity(
    states: dict[str, RevisionState], stable: str, now: CapacityStatus | None, time: datetime
) -> dict[str, RevisionState]:
    """Stores status.capacity of the stable revision, current or last served."""
    state = states.get(stable)
    if state is None or not state.accepted:
        return states
    capacity = retained(state.capacity, now, stamp(time))
    return {**states, stable: replace(state, capacity=capacity)}


def _accepted(state: RevisionState, plan: RolloutPlan, before: RevisionState) -> RevisionState:
    """The baseline is inherited, unless the revision was promoted or not comparable."""
    compared = plan.gate is not None and plan.gate.baseline > 0
    baseline = dict(before.baseline) if compared else {}
    return replace(state, accepted=before.accepted + 1, baseline=baseline)


def _with_new_baseline(state: RevisionState, serving: tuple[Measured, ...]) -> RevisionState:
    """A promotion of the stable revision: what it measures now becomes the baseline."""
    least = min(m.tokens for m in serving)
    text = f"promoted by hand: {least} KV tokens begin a new baseline"
    verdict = Verdict(GateResult.PASSED, text, least, promoted=True)
    return replace(state, verdict=StoredVerdict.of(verdict, state.accepted), baseline={})


def _with_raised_baseline(state: RevisionState, serving: tuple[Measured, ...]) -> RevisionState:
    """Raises the baseline of each GPU model to its smallest ready replica, if that is larger."""
    baseline = dict(state.baseline)
    for gpu in {m.gpu for m in serving}:
        least = min(m.tokens for m in serving if m.gpu == gpu)
        baseline[gpu] = max(least, baseline.get(gpu, 0))
    return replace(state, baseline=baseline, bytes_per_token=serving[0].bytes_per_token)
