"""Stored: each revision's verdict, figures and acceptance, in annotations of its
ControllerRevision. Pure.

The status of an InferenceService is never an input, so what must survive a restart of the operator
is stored here. An annotation that is unreadable counts as absent.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from kvline_contract import names
from kvline_contract.codec import ContractError
from kvline_contract.launch import KVCacheDtype
from kvline_contract.report import Termination
from kvline_contract.times import stamp
from kvline_operator import container_ends
from kvline_operator.capacity_status import CapacityStatus, retained
from kvline_operator.container_ends import PodEnds
from kvline_operator.gate import Baseline, ComparisonGroup, GateResult, Measured, Verdict
from kvline_operator.rollout import RolloutPlan
from kvline_operator.spec import gpus, parse_source, ranks
from kvline_operator.threshold import Thresholds

PASSED, REJECTED, PROMOTED = "Passed", "Rejected", "Promoted"
# Verdicts as annotations have them. A rejection is stored as «Failed»: earlier operators know only
# that, and would after a downgrade measure every rejected revision again.
STORED = {PASSED: "Passed", REJECTED: "Failed", PROMOTED: "Promoted"}
VERDICTS = {stored: verdict for verdict, stored in STORED.items()}
NUMBERS = {
    "accepted": names.ANNOTATION_ACCEPTED,
    "stable_at_verdict": names.ANNOTATION_AGAINST,
    "measured": names.ANNOTATION_MEASURED,
    "required": names.ANNOTATION_REQUIRED,
    "verdict_baseline": names.ANNOTATION_COMPARED,
    "bytes_per_token": names.ANNOTATION_BYTES,
    "expired": names.ANNOTATION_EXPIRED,
}
TEXTS = {
    "message": names.ANNOTATION_MESSAGE,
    "missing_since": names.ANNOTATION_SINCE,
    "expired_message": names.ANNOTATION_OVERDUE,
    "policy": names.ANNOTATION_EXPIRED_POLICY,
}
Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RevisionState:
    """What is stored of one revision."""

    accepted: int = 0  # number of the acceptance within the service; the highest is stable
    verdict: str = ""  # Passed, Rejected or Promoted; empty before the gate has decided
    stable_at_verdict: int = 0  # `accepted` of the stable revision at the time of the verdict
    measured: int = 0  # KV tokens, as in gate.Verdict
    required: int = 0
    verdict_baseline: int = 0  # that `required` is a percentage of; 0: none
    message: str = ""
    bytes_per_token: int = 0
    baseline: dict[str, int] = field(default_factory=dict)  # KV tokens by GPU model
    # Of a candidate that stable replicas were removed for; see deadline.py.
    missing_since: str = ""  # RFC 3339: since when they are missing without ready replacements
    expired: int = 0  # `accepted` of the stable revision that came back instead
    expired_message: str = ""  # why the candidate was not ready in time
    policy: str = ""  # ServiceSpec.policy when it expired
    capacity: CapacityStatus | None = None  # last served
    ends: PodEnds = field(default_factory=dict)  # failures of its containers
    diagnosis: Termination | None = None  # termination message of its failed engine

    def current_verdict(self, stable: RevisionState, policy: Thresholds) -> Verdict | None:
        """The stored verdict, if it was made against this stable revision. A rejection for too few
        tokens is dropped once the current thresholds accept them."""
        verdict = self.last_verdict() if self.stable_at_verdict == stable.accepted else None
        if verdict is None or verdict.result is GateResult.PASSED or not verdict.required:
            return verdict
        limit = replace(policy, baseline={"": verdict.baseline}).of("")
        return verdict if verdict.measured < limit.tokens else None

    def last_verdict(self) -> Verdict | None:
        """The stored verdict, whichever revision was stable then."""
        if not self.verdict:
            return None
        result = GateResult.REJECTED if self.verdict == REJECTED else GateResult.PASSED
        figures = (self.measured, self.required, self.verdict_baseline)
        promoted = self.verdict == PROMOTED
        return Verdict(result, self.message, *figures, promoted=promoted, diagnosis=self.diagnosis)


def read(controller_revision: Object) -> RevisionState:
    annotations = controller_revision["metadata"].get("annotations") or {}
    fields: dict[str, Any] = {name: annotations.get(key, "") for name, key in TEXTS.items()}
    fields |= {name: _number(annotations.get(key, "")) for name, key in NUMBERS.items()}
    return RevisionState(
        verdict=VERDICTS.get(annotations.get(names.ANNOTATION_VERDICT, ""), ""),
        baseline=_baseline(annotations.get(names.ANNOTATION_BASELINE, "")),
        capacity=CapacityStatus.parse(annotations.get(names.ANNOTATION_CAPACITY, "")),
        ends=container_ends.parse(annotations.get(names.ANNOTATION_ENDS, "")),
        diagnosis=_diagnosis(annotations.get(names.ANNOTATION_DIAGNOSIS, "")),
        **fields,
    )


def to_annotations(state: RevisionState) -> dict[str, str]:
    annotations: dict[str, Any] = {
        key: getattr(state, name) for name, key in (NUMBERS | TEXTS).items()
    }
    annotations[names.ANNOTATION_VERDICT] = STORED.get(state.verdict, "")
    if state.baseline:
        annotations[names.ANNOTATION_BASELINE] = json.dumps(state.baseline, sort_keys=True)
    if state.capacity is not None:
        annotations[names.ANNOTATION_CAPACITY] = state.capacity.dumps()
    annotations[names.ANNOTATION_ENDS] = container_ends.dumps(state.ends)
    if state.diagnosis is not None:
        annotations[names.ANNOTATION_DIAGNOSIS] = state.diagnosis.dumps()
    return {key: str(value) for key, value in annotations.items() if value}


def stable(states: dict[str, RevisionState]) -> str:
    """The revision that was accepted last; empty before the first."""
    accepted = {name: s.accepted for name, s in states.items() if s.accepted}
    return max(accepted, key=lambda name: accepted[name]) if accepted else ""


def promoted(state: RevisionState, stable: RevisionState, asked: bool) -> bool:
    """Whether annotation kvline.dev/promote accepts the revision now. It does so once: after
    another revision has been accepted it must be removed and set again."""
    used = state.verdict == PROMOTED and state.stable_at_verdict != stable.accepted
    return asked and not used


def without_used_promotions(
    states: dict[str, RevisionState], promote: str
) -> dict[str, RevisionState]:
    """Drops promotions that expired and whose annotation was removed: they may be made again."""
    return {
        name: replace(s, verdict="")
        if s.verdict == PROMOTED and s.expired and name != promote
        else s
        for name, s in states.items()
    }


def comparison_group(inputs: Object) -> ComparisonGroup:
    source = parse_source(inputs["model"]["source"])
    resources, engine = inputs["resources"], inputs.get("engine", {})
    return ComparisonGroup(
        source.text.partition("@")[0],
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
        if name != wanted and state.verdict == REJECTED:
            # A rejection holds while the spec asks for the revision. Afterwards it is history, and
            # the same spec applied again is measured again.
            out[name] = replace(state, stable_at_verdict=0)
        waits = name == wanted and name != plan.stable
        if name != promote and not waits and state.verdict == PROMOTED:
            out[name] = replace(state, verdict=PASSED)  # the annotation may be used again
    if plan.gate is not None and plan.gate.result is not GateResult.HELD:
        out[wanted] = _with_verdict(out[wanted], plan.gate, states[before])
    if plan.stable != before and serving:
        out[plan.stable] = _accepted(out[plan.stable], plan, states[before])
    elif serving and promote == plan.stable and out[promote].verdict != PROMOTED:
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


def _with_verdict(state: RevisionState, verdict: Verdict, stable: RevisionState) -> RevisionState:
    passed = PROMOTED if verdict.promoted else PASSED
    return replace(
        state,
        verdict=REJECTED if verdict.result is GateResult.REJECTED else passed,
        stable_at_verdict=stable.accepted,
        measured=verdict.measured,
        required=verdict.required,
        verdict_baseline=verdict.baseline,
        message=verdict.message,
        diagnosis=verdict.diagnosis,
    )


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
    return replace(_with_verdict(state, verdict, state), baseline={})


def _with_raised_baseline(state: RevisionState, serving: tuple[Measured, ...]) -> RevisionState:
    """Raises the baseline of each GPU model to its smallest ready replica, if that is larger."""
    baseline = dict(state.baseline)
    for gpu in {m.gpu for m in serving}:
        least = min(m.tokens for m in serving if m.gpu == gpu)
        baseline[gpu] = max(least, baseline.get(gpu, 0))
    return replace(state, baseline=baseline, bytes_per_token=serving[0].bytes_per_token)


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else 0


def _diagnosis(text: str) -> Termination | None:
    try:
        return Termination.parse(text)
    except ContractError:
        return None


def _baseline(text: str) -> dict[str, int]:
    try:
        found = json.loads(text) if text else {}
    except ValueError:
        return {}
    items = found.items() if isinstance(found, dict) else ()
    return {str(gpu)[:128]: n for gpu, n in items if isinstance(n, int) and n > 0}
