"""Everything that the status of a service is built from, as values."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kvline_contract.launch import Record
from kvline_contract.names import API_PORT
from kvline_operator.api.inputs import read
from kvline_operator.api.spec import ServiceSpec, scheme
from kvline_operator.observe import trouble
from kvline_operator.observe.ended_pods import EndedPod
from kvline_operator.observe.pods import PodView
from kvline_operator.observe.trouble import Trouble
from kvline_operator.plan.autoscale import Scaling
from kvline_operator.plan.prepare import Preparation
from kvline_operator.plan.rollout import RolloutPlan
from kvline_operator.plan.threshold import Thresholds
from kvline_operator.store.revision_state import RevisionState
from kvline_operator.store.verdict import Phase


@dataclass(frozen=True, slots=True)
class Condition:
    type: str
    status: str  # True, False, Unknown
    reason: str
    message: str = ""


@dataclass(frozen=True)  # no slots: what is derived is kept
class ServiceState:
    """Everything that conditions and status are built from."""

    spec: ServiceSpec
    plan: RolloutPlan
    pods: tuple[PodView, ...]
    ended: tuple[EndedPod, ...] = ()  # terminal pods of all revisions, newest first
    records: dict[str, Record] = field(default_factory=dict)  # by fingerprint
    apply_error: Condition | None = None  # a child object could not be written
    deadline_exceeded: bool = False
    refused: str = ""  # why the API server refuses pods of the spec's revision
    phases: dict[str, Phase] = field(default_factory=dict)  # by revision
    stable_state: RevisionState = field(default_factory=RevisionState)  # of the stable revision
    limits: Thresholds = field(default_factory=Thresholds)  # for replicas of the spec's revision
    image_outdated: bool = False
    scaling: Scaling | None = None
    preparing: Preparation | None = None  # the Job that its pods wait for
    # The server's memory limit in each revision's template.
    memory_limits: dict[str, str] = field(default_factory=dict)
    stable_data: dict[str, Any] = field(default_factory=dict)  # of its ControllerRevision
    # Whose server container ended since the last reconcile; no condition shows that where another
    # replica serves, or where the container runs again.
    newly_ended: tuple[PodView, ...] = ()

    @cached_property
    def inputs(self) -> dict[str, Any]:
        """The spec's inputs of a revision, parsed once."""
        return self.spec.inputs

    @cached_property
    def served_name(self) -> str:
        """The model name of the stable revision, which may differ from the current spec's."""
        return str(self.stable_data.get("servedName") or self.spec.served_name)

    @cached_property
    def troubles(self) -> tuple[Trouble, ...]:
        """Of the newest revision's pods."""
        return trouble.of_all(self.newest)

    @cached_property
    def refusal(self) -> Trouble | None:
        """Why the newest revision lacks pods."""
        ended = tuple(p for p in self.ended if p.revision == self.plan.newest)
        return trouble.of_refusals(self.refused, self.newest, ended, self.spec.gpus > 0)

    @cached_property
    def url(self) -> str:
        spec = self.spec
        tls = scheme(read(self.stable_data.get("inputs") or self.inputs))
        return f"{tls}://{spec.base}.{spec.namespace}.svc:{API_PORT}/v1"

    @cached_property
    def newest(self) -> tuple[PodView, ...]:
        """Pods of the candidate, else of the stable revision."""
        return tuple(p for p in self.pods if p.revision == self.plan.newest)

    @cached_property
    def stable(self) -> tuple[PodView, ...]:
        return tuple(p for p in self.pods if p.revision == self.plan.stable)

    @cached_property
    def serving(self) -> tuple[PodView, ...]:
        """Ready replicas with a validated size, of whatever revision: the Service leads to them.
        Not those of a candidate whose gate has not passed."""
        found = (p for p in self.pods if p.ready and p.validated)
        return tuple(p for p in found if p.revision != self.plan.closed)

    @cached_property
    def described(self) -> tuple[PodView, ...]:
        """Those whose figures the status has: of the stable revision, or, where none of it serves
        (late in Replace and Recreate), of the others."""
        stable = tuple(p for p in self.serving if p.revision == self.plan.stable)
        return stable or self.serving

    @cached_property
    def accepted(self) -> str:
        """The revision that was accepted last; empty before the first."""
        return next((name for name, p in self.phases.items() if p is Phase.ACCEPTED), "")


def newly_ended(pods: tuple[PodView, ...], before: tuple[PodView, ...]) -> tuple[PodView, ...]:
    """Those of `before`, the pods of the last reconcile, whose server container ended since."""
    numbers = {p.uid: p.end_number if p.ended else 0 for p in before}
    return tuple(p for p in pods if p.ended and p.end_number > numbers.get(p.uid, p.end_number))
