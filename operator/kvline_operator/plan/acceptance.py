"""Which revision is accepted, its verdict and its baseline. Pure."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

from kvline_contract.launch import KVCacheDtype, StateDtype
from kvline_contract.times import stamp
from kvline_operator.api.source import source_of
from kvline_operator.api.spec import gpus, ranks
from kvline_operator.observe.pods import Measured
from kvline_operator.observe.slots import Slots
from kvline_operator.plan.gate import Baseline, ComparisonGroup
from kvline_operator.plan.rollout import RolloutPlan
from kvline_operator.plan.threshold import Thresholds
from kvline_operator.plan.trade import Asked
from kvline_operator.store.capacity_status import CapacityStatus, retained
from kvline_operator.store.revision_state import RevisionState, stable
from kvline_operator.store.verdict import GateResult, StoredVerdict, Verdict

Object = dict[str, Any]
UNASKED = Asked()


def promotion_refused(state: RevisionState, measured: bool) -> str:
    """Why spec.rollout.promote, which names this revision, does not accept it now; empty where it
    does. It accepts it once, so that a field left in Git does not outlive a rollback."""
    if not (measured or state.was_measured):
        return "since no replica of it was ever measured"
    if state.promotion_used:
        return "since spec.rollout.promote has accepted it once: remove the field, and set it again"
    return ""


def is_promoted(state: RevisionState) -> bool:
    return state.verdict is not None and state.verdict.promoted


def without_used_promotions(
    states: dict[str, RevisionState], promote: str
) -> dict[str, RevisionState]:
    """Drops promotions that expired and are asked for no more: they may be made again."""
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
        engine.get("stateDtype", StateDtype.FLOAT32),
    )


def baseline_of(state: RevisionState, inputs: Object) -> Baseline:
    group, asked, served = comparison_group(inputs), Asked.of(inputs), state.capacity
    encoder = served.memory.upgraded().encoder() if served is not None else None
    sizes = state.bytes_per_token, state.baseline, state.slots or {}
    return Baseline(group, *sizes, asked, encoder)


def accept_first(
    states: dict[str, RevisionState],
    measured: dict[str, tuple[Measured, ...]],
    wanted: str,
    unread: frozenset[str] = frozenset(),
) -> dict[str, RevisionState]:
    """Accepts the first revision that serves, where none is accepted yet; also what an operator
    without gates left behind. `unread` are the revisions with ready replicas that are not
    `measured`."""
    serving = [name for name in measured if name in states]
    if stable(states) or not serving:
        return states
    name = wanted if wanted in serving else max(serving, key=lambda n: len(measured[n]))
    first = replace(states[name], accepted=1)
    begun = _with_raised_baseline(first, measured[name], name not in unread)
    return {**states, name: begun}


def updated(
    states: dict[str, RevisionState],
    plan: RolloutPlan,
    wanted: str,
    serving: tuple[Measured, ...],
    promote: str = "",
    read: bool = True,
    limits: Thresholds | None = None,
    asked: Asked = UNASKED,
) -> dict[str, RevisionState]:
    """All states after this reconcile. `serving` are the ready replicas of plan.stable, all of them
    where `read`; `promote` is spec.rollout.promote; `limits` are what `wanted` was compared
    with, `asked` the slots that it asks for."""
    out = dict(states)
    before = stable(states)
    if not before:
        return out
    for name, state in states.items():
        used = state.promotion_used and name == promote
        out[name] = replace(_past(state) if name != wanted else state, promotion_used=used)
    if plan.gate is not None:
        out[wanted] = _judged(out[wanted], plan.gate, states[before], promote == wanted)
    if plan.stable != before and serving:
        mine = limits if plan.stable == wanted else None
        kept = replace(states[before], slots=_kept(states[before], mine, asked, serving))
        out[plan.stable] = _accepted(out[plan.stable], plan, kept, mine)
    elif serving and read and promote == plan.stable and not out[promote].promotion_used:
        out[promote] = _with_new_baseline(out[promote], serving)
    if serving:
        out[plan.stable] = _with_raised_baseline(out[plan.stable], serving, read)
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


def _past(state: RevisionState) -> RevisionState:
    """Of a revision that the spec does not ask for. A rejection and a promotion hold while it does:
    the same spec applied again is measured again."""
    verdict = state.verdict
    if verdict is None or not (verdict.promoted or verdict.result is GateResult.REJECTED):
        return state
    return replace(state, verdict=replace(verdict, against=0))


def _judged(
    state: RevisionState, gate: Verdict, stable: RevisionState, asked: bool
) -> RevisionState:
    """`asked`: spec.rollout.promote names the revision."""
    if gate.result is GateResult.HELD:
        return replace(state, seen_tokens=gate.measured or state.seen_tokens)
    used = state.promotion_used or (asked and gate.promoted)
    return replace(state, verdict=StoredVerdict.of(gate, stable.accepted), promotion_used=used)


def _accepted(
    state: RevisionState, plan: RolloutPlan, before: RevisionState, limits: Thresholds | None
) -> RevisionState:
    """The baseline is inherited, unless the revision was promoted or not comparable; without what
    its spec has traded."""
    accepted = before.accepted + 1
    if plan.gate is None or not plan.gate.baseline:
        return replace(state, accepted=accepted, baseline={}, slots=None)
    if limits is None:
        return replace(state, accepted=accepted, baseline=dict(before.baseline), slots=before.slots)
    baseline = dict(limits.baseline)
    return replace(state, accepted=accepted, baseline=baseline, slots=before.slots)


def _kept(
    before: RevisionState, limits: Thresholds | None, asked: Asked, serving: tuple[Measured, ...]
) -> dict[str, Slots] | None:
    """The slots that an accepted revision inherits: as its spec asks for, since its tokens are
    without what these cost. Sequences that were not compared are those that a replica has now."""
    if limits is None:
        return before.slots
    now = {m.gpu for m in serving}
    known = (before.slots or {}).items()
    return {
        gpu: asked.expected(s) for gpu, s in known if gpu in limits.sequences or gpu not in now
    } or None


def _with_new_baseline(state: RevisionState, serving: tuple[Measured, ...]) -> RevisionState:
    """A promotion of the stable revision: what it measures now becomes the baseline."""
    least = min(m.tokens for m in serving)
    text = f"promoted by hand: {least} KV tokens begin a new baseline"
    verdict = Verdict(GateResult.PASSED, text, least, promoted=True)
    stored = StoredVerdict.of(verdict, state.accepted)
    return replace(state, verdict=stored, baseline={}, slots=None, promotion_used=True)


def _with_raised_baseline(
    state: RevisionState, serving: tuple[Measured, ...], read: bool
) -> RevisionState:
    """Raises the baseline of each GPU model to its smallest ready replica, if that is larger. Not
    before all are `read`: the smallest may be the one that has yet to answer."""
    baseline, slots = dict(state.baseline), dict(state.slots or {})
    for gpu in {m.gpu for m in serving} if read else ():
        least = min(m.tokens for m in serving if m.gpu == gpu)
        baseline[gpu] = max(least, baseline.get(gpu, 0))
        if found := [m.slots for m in serving if m.gpu == gpu and m.slots is not None]:
            fewest = min(found, key=lambda each: each.sequences)
            best = max(fewest.sequences, slots[gpu].sequences if gpu in slots else 0)
            slots[gpu] = replace(fewest, sequences=best)
    each = serving[0].bytes_per_token
    return replace(state, baseline=baseline, slots=slots or None, bytes_per_token=each)
