"""Which revisions serve, which one is accepted, and a rollout without replicas."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from services import BODY, HELD, PASSED, PLAIN, by_type, hybrid_pod, ready_pod, service_state

from kvline_contract.names import SERVER_CONTAINER
from kvline_operator.api.spec import parse
from kvline_operator.observe.children import Observed
from kvline_operator.observe.pods import PodView
from kvline_operator.plan.rollout import RolloutPlan
from kvline_operator.plan.service_plan import ServicePlan
from kvline_operator.report import status
from kvline_operator.report.reporter import requeue_after, service_state_of
from kvline_operator.settings import Settings
from kvline_operator.store import revision_state
from kvline_operator.store.capacity_status import CapacityStatus
from kvline_operator.store.revision_state import RevisionState
from kvline_operator.store.verdict import Phase, StoredVerdict, Verdict

SETTINGS = Settings("image")
NOW = datetime(2026, 11, 26, tzinfo=UTC)
BOTH = RolloutPlan({"aaaaa": 1, "bbbbb": 1}, "aaaaa", "bbbbb", PASSED)


def new(tokens: int, **more: Any) -> PodView:
    return ready_pod(tokens, name="chat-bbbbb-1", uid="u2", revision="bbbbb", **more)


def test_all_replicas_that_serve_count_and_the_figures_are_of_the_stable_revision() -> None:
    """Half-way in a rollout the Service leads to replicas of both revisions."""
    state = service_state(ready_pod(4000), new(5000), plan=BOTH)
    assert by_type(state)["Ready"].message == "2 replicas serve 9000 KV tokens"
    made = status.build(state, {}, "now")[0]["capacity"]
    assert (made["kvTokensTotal"], made["kvTokens"]) == (9000, 4000)
    assert made["spread"] == {"min": 4000, "max": 4000}


def test_sequences_that_run_at_once_are_named_where_slots_bound_them() -> None:
    state = service_state(hybrid_pod(4000, 64), new(5000), plan=BOTH)
    message = by_type(state)["Ready"].message
    assert message == "2 replicas serve 9000 KV tokens, 64 sequences at once"


def test_a_candidate_that_serves_alone_has_the_figures() -> None:
    """Late in Replace and Recreate. One whose gate is closed is not ready, and does not count."""
    state = service_state(PLAIN, new(5000), plan=BOTH)
    assert by_type(state)["Ready"].message == "1 replica serves 5000 KV tokens"
    made = status.build(state, {}, "now")[0]["capacity"]
    assert (made["kvTokensTotal"], made["kvTokens"]) == (5000, 5000)
    waits = replace(new(5000), ready=False)
    held = replace(BOTH, gate=HELD)
    made = status.build(service_state(ready_pod(4000), waits, plan=held), {}, "now")[0]["capacity"]
    assert made["kvTokensTotal"] == 4000


def test_a_replica_of_a_spec_that_changed_again_serves_until_it_is_removed() -> None:
    plan = RolloutPlan({"aaaaa": 1, "bbbbb": 1}, "aaaaa")
    state = service_state(ready_pod(4000), new(5000), plan=plan)
    assert by_type(state)["Ready"].message == "2 replicas serve 9000 KV tokens"


def rollout(phases: dict[str, Phase], plan: RolloutPlan) -> dict[str, Any]:
    made: dict[str, Any] = status.build(service_state(PLAIN, plan=plan, phases=phases), {}, "now")[
        0
    ]
    return dict(made["rollout"])


def test_the_stable_revision_is_the_one_that_was_accepted() -> None:
    """Not the first one before it has served, nor one that has passed before it is stored."""
    first = rollout({"aaaaa": Phase.NEW}, RolloutPlan({"aaaaa": 1}, "aaaaa"))
    assert (first["stableRevision"], first["candidateRevision"]) == ("", "aaaaa")
    passed = rollout(
        {"aaaaa": Phase.ACCEPTED, "bbbbb": Phase.PASSED},
        RolloutPlan({"bbbbb": 1}, "bbbbb", gate=PASSED),
    )
    assert (passed["stableRevision"], passed["candidateRevision"]) == ("aaaaa", "bbbbb")
    taken = rollout(
        {"aaaaa": Phase.NEW, "bbbbb": Phase.ACCEPTED}, RolloutPlan({"bbbbb": 1}, "bbbbb")
    )
    assert taken["stableRevision"] == "bbbbb" and "candidateRevision" not in taken


SERVER = {"name": SERVER_CONTAINER, "resources": {"limits": {"memory": "2Gi"}}}


def stored(name: str, length: int, state: RevisionState) -> dict[str, Any]:
    inputs = {**parse(BODY).inputs, "engine": {"maxModelLen": length}}
    return {
        "metadata": {
            "name": f"chat-{name}",
            "labels": {"kvline.dev/revision": name},
            "annotations": revision_state.to_annotations(state),
        },
        "revision": length,
        "data": {
            "inputs": inputs,
            "image": "image",
            "podTemplate": {"spec": {"containers": [SERVER]}},
        },
    }


@pytest.mark.fault("F73", shows="such a service is not looked at again before an event")
@pytest.mark.parametrize("verdict", [None, PASSED])
def test_without_replicas_a_new_revision_waits_and_the_service_is_at_rest(
    verdict: Verdict | None,
) -> None:
    """It would be looked at again and again as being measured. With a replica it goes on."""
    figures = CapacityStatus.of([ready_pod().report])
    stable = RevisionState(accepted=1, baseline={"": 4096}, bytes_per_token=512, capacity=figures)
    judged = RevisionState(verdict=StoredVerdict.of(verdict, 1) if verdict else None)
    revisions = [stored("aaaaa", 1, stable), stored("bbbbb", 2, judged)]

    def planned(replicas: int) -> ServicePlan:
        spec = {**BODY["spec"], "engine": {"maxModelLen": 2}, "replicas": replicas}
        made = parse({**BODY, "spec": spec})
        return ServicePlan.of(made, Observed(revisions, [], [], ()), SETTINGS, NOW)

    state = service_state_of(planned(0), None, None)
    got = by_type(state)
    assert state.plan.candidate == "bbbbb"
    assert state.memory_limits == {"aaaaa": "2Gi", "bbbbb": "2Gi"}
    assert (got["UpToDate"].status, got["UpToDate"].reason) == ("True", "ScaledToZero")
    assert got["UpToDate"].message == (
        "spec.replicas is 0: revision bbbbb is rolled out once there are replicas, and aaaaa is "
        "stable until then"
    )
    assert (got["Progressing"].reason, got["Ready"].reason) == ("Complete", "ScaledToZero")
    assert requeue_after(SETTINGS, state) == 0
    made = status.build(state, {}, "now")[0]
    assert not {"Reconciling", "Stalled"} & {c["type"] for c in made["conditions"]}
    again = service_state_of(planned(1), None, None)
    assert by_type(again)["UpToDate"].reason == "RollingOut"
    assert requeue_after(SETTINGS, again) > 0
