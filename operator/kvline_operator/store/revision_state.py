"""Each revision's verdict, figures and acceptance, in annotations of its
ControllerRevision. Pure.

The status of an InferenceService is never an input, so what must survive a restart of the operator
is stored here. An annotation that is unreadable counts as absent.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from kvline_contract import names
from kvline_contract.codec import ContractError
from kvline_contract.report import Termination
from kvline_operator.store import container_ends
from kvline_operator.store.capacity_status import CapacityStatus
from kvline_operator.store.container_ends import PodEnds
from kvline_operator.store.verdict import GateResult, Verdict

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
