"""From a spec and what is remembered to what runs: a service's reconciles one after another, with
annotations as all that is kept between them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from kvline_operator import render, revision_state
from kvline_operator.observe import Observed
from kvline_operator.revision_state import RevisionState
from kvline_operator.revisions import Revision
from kvline_operator.rollout_state import RolloutState
from kvline_operator.settings import Settings
from kvline_operator.spec import ServiceSpec, parse

SETTINGS = Settings("registry.example/server@sha256:" + "0" * 64)
STABLE, CANDIDATE = "aaaaa", "bbbbb"
HOW = {"strategy": "Recreate", "progressDeadlineSeconds": 60}


def spec(length: int = 2048, promote: str = "", **more: Any) -> ServiceSpec:
    meta: dict[str, Any] = {"name": "chat", "namespace": "ns", "uid": "u"}
    meta["annotations"] = {"kvline.dev/promote": promote} if promote else {}
    base = {"model": {"source": "pvc://m/x"}, "resources": {"memory": "2Gi"}}
    return parse(
        {
            "metadata": meta,
            "spec": {**base, "engine": {"maxModelLen": length}, "rollout": HOW, **more},
        }
    )


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

    def step(self, now: ServiceSpec, seconds: int = 1) -> RolloutState:
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
        observed = Observed([], deployments, [], (), jobs=(job,))
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
    promoted = spec(promote=CANDIDATE)
    for _ in range(2):
        assert service.step(promoted).plan.replicas == {CANDIDATE: 1, STABLE: 0}
        assert service.step(promoted, 60).plan.replicas == {STABLE: 1}
        assert service.step(promoted, 9999).plan.replicas == {STABLE: 1}
        assert service.step(spec()).plan.replicas == {STABLE: 1}
        assert service.step(spec()).plan.replicas == {STABLE: 1}
