"""Remember: what became of each revision, as annotations of its ControllerRevision. Pure.

Status is never an input, so the verdict of a gate, the sizes it compared and the order in which
revisions were accepted are kept here. What somebody else made unreadable counts as not said.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from kvline_contract import names
from kvline_contract.codec import ContractError
from kvline_contract.report import Termination
from kvline_operator import kills
from kvline_operator.capacity_status import STAMP, CapacityStatus, keep
from kvline_operator.gate import Baseline, GateResult, Kind, Measured, Verdict
from kvline_operator.kills import Kills
from kvline_operator.rollout import RolloutPlan
from kvline_operator.spec import parse_source
from kvline_operator.threshold import Thresholds

PASSED, REJECTED, PROMOTED = "Passed", "Rejected", "Promoted"
# As annotations have them. A rejection stays «Failed» there: an older operator knows no other word
# for it, and after a downgrade would try every rejected revision again.
STORED = {PASSED: "Passed", REJECTED: "Failed", PROMOTED: "Promoted"}
VERDICTS = {stored: verdict for verdict, stored in STORED.items()}
NUMBERS = {
    "accepted": names.ANNOTATION_ACCEPTED,
    "against": names.ANNOTATION_AGAINST,
    "measured": names.ANNOTATION_MEASURED,
    "required": names.ANNOTATION_REQUIRED,
    "compared": names.ANNOTATION_COMPARED,
    "bytes_per_token": names.ANNOTATION_BYTES,
    "expired": names.ANNOTATION_EXPIRED,
}
TEXTS = {
    "message": names.ANNOTATION_MESSAGE,
    "since": names.ANNOTATION_SINCE,
    "overdue": names.ANNOTATION_OVERDUE,
    "policy": names.ANNOTATION_EXPIRED_POLICY,
}
Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RevisionState:
    """A revision's past."""

    accepted: int = 0  # counts acceptances of the service; the highest is the stable one
    verdict: str = ""  # of its gate
    against: int = 0  # `accepted` of the revision that it was judged beside
    measured: int = 0
    required: int = 0
    compared: int = 0  # the baseline that `required` is a share of; 0: there was none
    message: str = ""
    bytes_per_token: int = 0
    baseline: dict[str, int] = field(default_factory=dict)  # tokens by GPU model
    # Of a candidate that replicas were taken away for; deadline.py.
    since: str = ""  # RFC 3339: since when none of its own is ready in their place
    expired: int = 0  # `accepted` of the revision that was brought back instead
    overdue: str = ""  # what kept it until then
    policy: str = ""  # of ServiceSpec, at that time
    figures: CapacityStatus | None = None  # that it served last
    kills: Kills = field(default_factory=dict)  # of a candidate's containers, from outside
    diagnosis: Termination | None = None  # what its engine said that failed

    def verdict_now(self, stable: RevisionState, policy: Thresholds) -> Verdict | None:
        """The verdict that was given beside this stable revision, if there is one. What measured
        too little then and has enough by today's policy is judged anew."""
        verdict = self.last_verdict() if self.against == stable.accepted else None
        if verdict is None or verdict.result is GateResult.PASSED or not verdict.required:
            return verdict
        limit = replace(policy, baseline={"": verdict.baseline}).of("")
        return verdict if verdict.measured < limit.tokens else None

    def last_verdict(self) -> Verdict | None:
        """Whatever it was given beside."""
        if not self.verdict:
            return None
        result = GateResult.REJECTED if self.verdict == REJECTED else GateResult.PASSED
        figures = (self.measured, self.required, self.compared)
        promoted = self.verdict == PROMOTED
        return Verdict(result, self.message, *figures, promoted=promoted, diagnosis=self.diagnosis)


def read(controller_revision: Object) -> RevisionState:
    said = controller_revision["metadata"].get("annotations") or {}
    fields: dict[str, Any] = {name: said.get(key, "") for name, key in TEXTS.items()}
    fields |= {name: _number(said.get(key, "")) for name, key in NUMBERS.items()}
    return RevisionState(
        verdict=VERDICTS.get(said.get(names.ANNOTATION_VERDICT, ""), ""),
        baseline=_baseline(said.get(names.ANNOTATION_BASELINE, "")),
        figures=CapacityStatus.parse(said.get(names.ANNOTATION_CAPACITY, "")),
        kills=kills.parse(said.get(names.ANNOTATION_KILLS, "")),
        diagnosis=_diagnosis(said.get(names.ANNOTATION_DIAGNOSIS, "")),
        **fields,
    )


def written(state: RevisionState) -> dict[str, str]:
    said: dict[str, Any] = {key: getattr(state, name) for name, key in (NUMBERS | TEXTS).items()}
    said[names.ANNOTATION_VERDICT] = STORED.get(state.verdict, "")
    if state.baseline:
        said[names.ANNOTATION_BASELINE] = json.dumps(state.baseline, sort_keys=True)
    if state.figures is not None:
        said[names.ANNOTATION_CAPACITY] = state.figures.dumps()
    said[names.ANNOTATION_KILLS] = kills.dumps(state.kills)
    if state.diagnosis is not None:
        said[names.ANNOTATION_DIAGNOSIS] = state.diagnosis.dumps()
    return {key: str(value) for key, value in said.items() if value}


def stable(states: dict[str, RevisionState]) -> str:
    """The revision that was accepted last; empty before the first."""
    accepted = {name: s.accepted for name, s in states.items() if s.accepted}
    return max(accepted, key=lambda name: accepted[name]) if accepted else ""


def promoted(state: RevisionState, stable: RevisionState, asked: bool) -> bool:
    """Whether a person lets it pass now. An annotation that already did, before something else was
    accepted, is spent until it is taken away."""
    spent = state.verdict == PROMOTED and state.against != stable.accepted
    return asked and not spent


def without_spent(states: dict[str, RevisionState], promote: str) -> dict[str, RevisionState]:
    """Without promotions that expired and whose annotation is gone: each may be given again."""
    return {
        name: replace(s, verdict="")
        if s.verdict == PROMOTED and s.expired and name != promote
        else s
        for name, s in states.items()
    }


def kind(inputs: Object) -> Kind:
    source = parse_source(inputs["model"]["source"])
    return Kind(source.text.partition("@")[0], int(inputs["resources"].get("gpus", 0)))


def proven(state: RevisionState, inputs: Object) -> Baseline:
    return Baseline(kind(inputs), state.bytes_per_token, state.baseline)


def first(
    states: dict[str, RevisionState], measured: dict[str, tuple[Measured, ...]], wanted: str
) -> dict[str, RevisionState]:
    """With an accepted revision where none was yet and one serves: what serves first is the
    beginning, and so is what an operator without gates left behind."""
    serving = [name for name in measured if name in states]
    if stable(states) or not serving:
        return states
    name = wanted if wanted in serving else max(serving, key=lambda n: len(measured[n]))
    begun = _raised(replace(states[name], accepted=1), measured[name])
    return {**states, name: begun}


def remember(
    states: dict[str, RevisionState],
    plan: RolloutPlan,
    wanted: str,
    serving: tuple[Measured, ...],
    promote: str = "",
) -> dict[str, RevisionState]:
    """All states after this reconcile. `serving` are the ready replicas of plan.stable,
    `promote` the revision that the annotation names."""
    out = dict(states)
    before = stable(states)
    if not before:
        return out
    for name, state in states.items():
        if name != wanted and state.verdict == REJECTED:
            # Turned down until the spec says something else: then it may be judged anew, and what
            # was measured stays its history.
            out[name] = replace(state, against=0)
        waits = name == wanted and name != plan.stable
        if name != promote and not waits and state.verdict == PROMOTED:
            out[name] = replace(state, verdict=PASSED)  # the annotation may be used again
    if plan.gate is not None and plan.gate.result is not GateResult.HELD:
        out[wanted] = _judged(out[wanted], plan.gate, states[before])
    if plan.stable != before and serving:
        out[plan.stable] = _accepted(out[plan.stable], plan, states[before])
    elif serving and promote == plan.stable and out[promote].verdict != PROMOTED:
        out[promote] = _begun_anew(out[promote], serving)
    if serving:
        out[plan.stable] = _raised(out[plan.stable], serving)
    return out


def kept(
    states: dict[str, RevisionState], stable: str, now: CapacityStatus | None, time: datetime
) -> dict[str, RevisionState]:
    """With the figures that the stable revision serves, or served last."""
    state = states.get(stable)
    if state is None or not state.accepted:
        return states
    figures = keep(state.figures, now, time.strftime(STAMP))
    return {**states, stable: replace(state, figures=figures)}


def _judged(state: RevisionState, verdict: Verdict, beside: RevisionState) -> RevisionState:
    word = (
        REJECTED
        if verdict.result is GateResult.REJECTED
        else PROMOTED
        if verdict.promoted
        else PASSED
    )
    return replace(
        state,
        verdict=word,
        against=beside.accepted,
        measured=verdict.measured,
        required=verdict.required,
        compared=verdict.baseline,
        message=verdict.message,
        diagnosis=verdict.diagnosis,
    )


def _accepted(state: RevisionState, plan: RolloutPlan, before: RevisionState) -> RevisionState:
    """A promotion and a revision that was not comparable begin the baseline anew."""
    compared = plan.gate is not None and plan.gate.baseline > 0
    baseline = dict(before.baseline) if compared else {}
    return replace(state, accepted=before.accepted + 1, baseline=baseline)


def _begun_anew(state: RevisionState, serving: tuple[Measured, ...]) -> RevisionState:
    """A person takes what an accepted revision measures now as its baseline."""
    least = min(m.tokens for m in serving)
    text = f"promoted by hand: {least} KV tokens begin a new baseline"
    verdict = Verdict(GateResult.PASSED, text, least, promoted=True)
    return replace(_judged(state, verdict, state), baseline={})


def _raised(state: RevisionState, serving: tuple[Measured, ...]) -> RevisionState:
    """The best that all ready replicas of one GPU model had at a time."""
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
