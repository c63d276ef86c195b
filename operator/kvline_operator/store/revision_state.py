"""What is kept of a revision: one document in an annotation of its ControllerRevision. Pure.

The status of an InferenceService is never an input, so what must survive a restart of the operator
is stored here, as facts: in which phase a revision is follows from them (plan/phase.py). A document
that is unreadable counts as absent. One of a newer version ends the reconcile, since a write would
lose what it has.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from kvline_contract.codec import ContractError, decode, document, dumps, field, loads
from kvline_contract.names import ANNOTATION_STATE
from kvline_operator.errors import NewerState
from kvline_operator.observe.slots import Slots
from kvline_operator.store import earlier
from kvline_operator.store.capacity_status import MAX_BYTES, CapacityStatus
from kvline_operator.store.container_ends import MAX_PODS, PodEnds
from kvline_operator.store.verdict import MAX_MESSAGE, StoredVerdict

log = logging.getLogger("kvline")
VERSION = 1  # raised where an operator of the version before must not write over a document
MAX_STATE_BYTES = MAX_BYTES + 64 * 1024  # the API server takes 256 KiB of annotations
MAX_GPU_MODELS, MAX_GPU_NAME = 256, 128
Object = dict[str, Any]


@document
class Expiry:
    """A candidate that was not ready in time, where stable replicas had been removed for it."""

    against: int = field(low=1)  # `accepted` of the revision that came back
    message: str = field(limit=MAX_MESSAGE, default="")  # why it was not ready
    policy: str = field(limit=64, default="")  # ServiceSpec.policy then; empty: not known


@document
class RevisionState:
    version: int = VERSION
    accepted: int = 0  # number of the acceptance within the service; the highest is stable
    verdict: StoredVerdict | None = field(omit_none=True, default=None)  # the gate's last one
    bytes_per_token: int = 0
    seen_tokens: int = 0  # KV tokens that were measured before there was a verdict
    promotion_used: bool = False  # spec.rollout.promote names it, and has accepted it
    baseline: dict[str, int] = field(  # KV tokens by GPU model
        low=1, items=MAX_GPU_MODELS, keys=MAX_GPU_NAME, default_factory=dict
    )
    # By GPU model, where layers of its model keep recurrent states: those beside the baseline
    slots: dict[str, Slots] | None = field(
        items=MAX_GPU_MODELS, keys=MAX_GPU_NAME, omit_none=True, default=None
    )
    # RFC 3339: since when stable replicas are missing without ready ones of this candidate
    missing_since: str = field(limit=32, default="")
    expiry: Expiry | None = field(omit_none=True, default=None)
    capacity: CapacityStatus | None = field(omit_none=True, default=None)  # last served
    # Failures of its containers
    ends: PodEnds = field(items=MAX_PODS, default_factory=dict)

    @property
    def measured(self) -> int:
        """KV tokens in the gate's last verdict; 0: none."""
        return self.verdict.measured if self.verdict is not None else 0

    @property
    def was_measured(self) -> bool:
        """Whether a replica of it ever was."""
        return bool(self.accepted or self.measured or self.seen_tokens)

    @property
    def required(self) -> int:
        return self.verdict.required if self.verdict is not None else 0

    def against(self, stable: RevisionState) -> StoredVerdict | None:
        """The verdict, if it was made beside this stable revision."""
        verdict = self.verdict
        return verdict if verdict is not None and verdict.against == stable.accepted else None


def read(controller_revision: Object) -> RevisionState:
    """Raises NewerState."""
    meta = controller_revision["metadata"]
    annotations = meta.get("annotations") or {}
    text = annotations.get(ANNOTATION_STATE)
    try:
        value = loads(text, MAX_STATE_BYTES) if text else earlier.document(annotations)
        return decode(RevisionState, _known(value), strict=False)
    except NewerState as error:
        raise NewerState(f"ControllerRevision {meta.get('name')}: {error}") from None
    except ValueError as error:  # also of text that is no UTF-8
        log.warning("ControllerRevision %s is measured anew: %s", meta.get("name"), error)
        return RevisionState()


def _known(value: Object) -> Object:
    version = value.get("version")
    if type(version) is int and version > VERSION:
        raise NewerState(
            f"annotation {ANNOTATION_STATE} has version {version}, and this operator reads up to "
            f"{VERSION}: upgrade the operator, or remove the annotation to measure anew"
        )
    if version != VERSION:
        raise ContractError(f"version: expected {VERSION}, got {version!r:.24}")
    return value


def to_annotations(state: RevisionState) -> dict[str, str]:
    """Deterministic: equal states have one text."""
    baseline, ends = dict(sorted(state.baseline.items())), dict(sorted(state.ends.items()))
    slots = state.slots and dict(sorted(state.slots.items()))
    return {ANNOTATION_STATE: dumps(replace(state, baseline=baseline, slots=slots, ends=ends))}


def is_stored(state: RevisionState, controller_revision: Object) -> bool:
    """Whether the annotation has this text. A form that others gave it is written over."""
    annotations = controller_revision["metadata"].get("annotations") or {}
    return annotations.get(ANNOTATION_STATE) == to_annotations(state)[ANNOTATION_STATE]


def stable(states: dict[str, RevisionState]) -> str:
    """The revision that was accepted last; empty before the first."""
    accepted = {name: s.accepted for name, s in states.items() if s.accepted}
    return max(accepted, key=lambda name: accepted[name]) if accepted else ""
