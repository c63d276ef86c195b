"""From a spec and what is remembered to what runs: a service's reconciles one after another, with
annotations as all that is kept between them."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from kvline_contract.memory import MemoryV1
from kvline_contract.names import LABEL_REVISION
from kvline_contract.report import Result, SizingReport, Source, State
from kvline_operator.api.spec import ServiceSpec, parse
from kvline_operator.observe.children import Observed
from kvline_operator.observe.pods import PodView, view
from kvline_operator.observe.reports import Reading
from kvline_operator.plan import render
from kvline_operator.plan.revisions import Revision
from kvline_operator.plan.rollout_state import RolloutState
from kvline_operator.plan.service_plan import ServicePlan
from kvline_operator.report.reporter import requeue_after
from kvline_operator.settings import Settings
from kvline_operator.store import revision_state
from kvline_operator.store.revision_state import Expiry, RevisionState
from kvline_operator.store.verdict import GateResult, StoredVerdict, Verdict

SETTINGS = Settings("registry.example/server@sha256:" + "0" * 64)
STABLE, CANDIDATE = "aaaaa", "bbbbb"
HOW = {"strategy": "Recreate", "progressDeadlineSeconds": 60}


def spec(length: int = 2048, promote: str = "", **more: Any) -> ServiceSpec:
    meta = {"name": "chat", "namespace": "ns", "uid": "u"}
    base = {"model": {"source": "pvc://m/x"}, "resources": {"memory": "2Gi"}}
    given = {**base, "engine": {"maxModelLen": length}, "rollout": HOW, **more}
    if promote:
        given["rollout"] = {**given["rollout"], "promote": promote}
    return parse({"metadata": meta, "spec": given})


class Service:
    """One replica serves, and a candidate that never gets a pod is on its way. Its image is there:
    the Job that pulls it has ended."""

    def __init__(self) -> None:
        self.time = datetime(2026, 11, 23, 10, tzinfo=UTC)
        made = {STABLE: spec(1024), CANDIDATE: spec()}
        self.stored = {
            name: render.controller_revision(
                s, Revision(name, "image", s.inputs_json, number), SETTINGS
            )
            for number, (name, s) in enumerate(made.items(), 1)
        }
        serves = RevisionState(accepted=1, baseline={"": 1000}, bytes_per_token=1)
        self.states = {STABLE: serves, CANDIDATE: RevisionState()}
        self.replicas = {STABLE: 1}

    def step(self, now: ServiceSpec, seconds: int = 1, *pods: PodView) -> RolloutState:
        self.time += timedelta(seconds=seconds)
        deployments = [
            {
                "metadata": {"name": f"chat-{name}", "labels": {"kvline.dev/revision": name}},
                "spec": {"replicas": count},
                "status": {"readyReplicas": count if name == STABLE else 0},
            }
            for name, count in self.replicas.items()
        ]
        labels = {"kvline.dev/revision": CANDIDATE}
        job = {
            "metadata": {"name": f"chat-{CANDIDATE}-prepare", "uid": "j", "labels": labels},
            "status": {"conditions": [{"type": "Complete", "status": "True"}]},
        }
        observed = Observed([], deployments, [], pods, jobs=(job,))
        made = RolloutState.of(now, observed, CANDIDATE, self.stored, self.states, self.time)
        self.replicas = made.plan.replicas
        self.states = {
            name: revision_state.read(
                {"metadata": {"annotations": revision_state.to_annotations(state)}}
            )
            for name, state in made.states.items()
        }
        return made

    def expired(self, **more: Any) -> Service:
        """Its candidate has had its time."""
        assert self.step(spec(**more)).plan.candidate == CANDIDATE
        assert self.step(spec(**more), 60).plan.rejected == CANDIDATE
        assert self.step(spec(**more), 9999).plan.replicas == {STABLE: 1}
        return self


@pytest.mark.parametrize(
    ("change", "again"),
    [
        ({"capacity": {"minKVTokens": 1}}, True),
        ({"rollout": {**HOW, "progressDeadlineSeconds": 7200}}, True),
        ({"rollout": {**HOW, "strategy": "Surge"}}, True),
        ({"replicas": 5}, False),
        ({"autoscaling": {"maxReplicas": 5}}, False),
    ],
)
def test_a_policy_that_changed_tries_an_expired_candidate_again(
    change: dict[str, Any], again: bool
) -> None:
    """What its message and the documentation advise is heard; a number of replicas is none."""
    service = Service().expired()
    assert service.step(spec(**change)).plan.candidate == (CANDIDATE if again else "")


def test_a_promotion_that_expired_can_be_given_again() -> None:
    """Taken away and set anew, as the documentation says; while it stands it is tried once."""
    service = Service().expired()
    service.states[CANDIDATE] = replace(service.states[CANDIDATE], seen_tokens=700)
    promoted = spec(promote=CANDIDATE)
    for _ in range(2):
        assert service.step(promoted).plan.replicas == {CANDIDATE: 1, STABLE: 0}
        assert service.step(promoted, 60).plan.replicas == {STABLE: 1}
        assert service.step(promoted, 9999).plan.replicas == {STABLE: 1}
        assert service.step(spec()).plan.replicas == {STABLE: 1}
        assert service.step(spec()).plan.replicas == {STABLE: 1}


def test_a_promotion_of_what_was_never_measured_is_refused_with_its_reason() -> None:
    """It neither expires the candidate's expiry nor removes a stable replica."""
    service = Service().expired()
    for seconds in (1, 60, 9999):
        made = service.step(spec(promote=CANDIDATE), seconds)
        assert made.plan.replicas == {STABLE: 1} and made.plan.gate is not None
        assert "no replica of it was ever measured" in made.plan.gate.promotion_refused
        assert not made.plan.gate.promoted
    plain = service.step(spec()).plan.gate
    assert plain is not None and not plain.promotion_refused


def test_a_pause_does_not_try_an_expired_candidate_again() -> None:
    service = Service().expired()
    for paused in (True, False):
        made = service.step(spec(rollout={**HOW, "paused": paused}))
        assert (made.plan.replicas[STABLE], made.plan.replicas.get(CANDIDATE, 0)) == (1, 0)


def pod(revision: str, state: State = State.VALIDATED, ready: bool = False) -> PodView:
    """A running pod with its report."""
    memory = MemoryV1(100, 20, 10, 0, 50, 10, 10).upgraded()
    result = Result(4096, 512, Source.MEASURED, "f" * 32, 90, 6000, 0, "t", (memory,))
    validated = result if state is State.VALIDATED else None
    report = SizingReport(revision, "p", "r", 1, state, "t", "t", result=validated)
    running = {"name": "server", "state": {"running": {}}}
    conditions = [{"type": "Ready", "status": str(ready)}]
    return view(
        {
            "metadata": {"name": revision, "uid": revision, "labels": {LABEL_REVISION: revision}},
            "status": {
                "podIP": f"ip-{revision}",
                "containerStatuses": [running],
                "conditions": conditions,
            },
        },
        Reading(report),
    )


@pytest.mark.parametrize("begun", [True, False])
def test_a_baseline_is_raised_once_every_ready_replica_was_read(begun: bool) -> None:
    """After a start of the operator the smallest may be slow to answer. Raised without it, the
    baseline would reject an equal candidate, for good."""
    service, read = Service(), pod(STABLE, ready=True)
    if not begun:
        service.states[STABLE] = RevisionState()
    before = service.states[STABLE].baseline
    unread = replace(read, report=None, report_error="no answer in time")
    for _ in range(2):
        service.step(spec(), 1, read, unread)
        kept = service.states[STABLE]
        assert (kept.accepted, kept.baseline) == (1, before)
        assert kept.bytes_per_token == 512
    unready = replace(unread, ready=False)
    service.step(spec(), 1, read, read, unready, replace(unread, revision=CANDIDATE))
    assert service.states[STABLE].baseline == {"": 4096}


def test_only_pods_whose_gate_file_is_open_are_notified() -> None:
    """Not a candidate without a verdict, nor one that the plan has given up."""
    now = spec()
    made = Service().step(now)
    both = (pod(STABLE), pod(CANDIDATE))
    assert made.plan.candidate == CANDIDATE

    def notified(pods: tuple[PodView, ...] = both, **plan: Any) -> list[str]:
        state = replace(made, plan=replace(made.plan, **plan))
        return [seen.uid for seen in state.to_notify(pods)]

    assert made.plan.replicas == {CANDIDATE: 1, STABLE: 0} and notified() == []
    passed = Verdict(GateResult.PASSED, "")
    two = {STABLE: 1, CANDIDATE: 1}
    assert notified(replicas=two, gate=Verdict(GateResult.HELD, "")) == [STABLE]
    assert notified(replicas=two, gate=passed) == [STABLE, CANDIDATE]
    unlike = (pod(STABLE, ready=True), pod(CANDIDATE, State.VALIDATING))
    assert notified(unlike, replicas=two, gate=passed) == []
    # The spec is the stable one's again; the candidate is past its deadline with a verdict; both
    # have pods for a while.
    one = {STABLE: 1}
    assert notified(replicas=one, candidate="", gate=None) == [STABLE]
    expired = replace(passed, expired=True)
    for replicas in (one, {**one, CANDIDATE: 0}):
        assert notified(replicas=replicas, candidate="", rejected=CANDIDATE, gate=expired) == [
            STABLE
        ]
    assert notified(replicas={"ccccc": 1, **one}, candidate="ccccc", gate=None) == [STABLE]


def test_a_near_verdict_that_ends_an_outage_is_asked_for_sooner() -> None:
    def seconds(candidate: str, *pods: PodView) -> float:
        plan = SimpleNamespace(candidate=candidate)
        state = SimpleNamespace(pods=pods, plan=plan)
        settings = replace(SETTINGS, poll_seconds=1.0)
        return requeue_after(settings, state)  # type: ignore[arg-type]

    near, serves = pod(CANDIDATE, State.VALIDATING), pod(STABLE, ready=True)
    assert seconds(CANDIDATE, near) == 0.25
    assert seconds(CANDIDATE, near, serves) == 1.0
    assert seconds("", near) == 1.0
    assert seconds(CANDIDATE, pod(CANDIDATE, State.STRESSING)) == 1.0


@pytest.mark.parametrize(
    ("state", "plan"),
    [
        (RevisionState(verdict=StoredVerdict(GateResult.REJECTED, 1)), ("", CANDIDATE)),
        (RevisionState(expiry=Expiry(1)), ("", CANDIDATE)),
        (RevisionState(missing_since="2026-11-23T10:00:00Z"), (CANDIDATE, "")),
    ],
)
def test_an_upgrade_of_the_operator_renames_no_revision_on_its_way(
    state: RevisionState, plan: tuple[str, str]
) -> None:
    """It has the default image of before. Under another name it would be rolled out once more, and
    take the stable replicas away for it. One that was asked for in between is newer."""
    old = RevisionState(verdict=StoredVerdict(GateResult.REJECTED, 0))  # counts no more
    made = {
        STABLE: (spec(1024), "one", RevisionState(accepted=1)),
        CANDIDATE: (spec(), "two", state),
        "ccccc": (spec(512), "two", old),
    }
    stored = []
    for number, (name, (of, image, kept)) in enumerate(made.items(), 1):
        revision = Revision(name, image, of.inputs_json, number)
        item = render.controller_revision(of, revision, SETTINGS)
        stored.append(render.with_annotations(of, item, revision_state.to_annotations(kept)))
    observed = Observed(stored, [], [], ())
    now = datetime(2026, 11, 23, 10, tzinfo=UTC)
    got = ServicePlan.of(spec(), observed, Settings("three"), now).rollout
    assert got.stored.keys() == made.keys()
    assert (got.plan.candidate, got.plan.rejected) == plan
