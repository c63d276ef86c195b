"""Replicas follow the load, with a real API server: the played node reports each replica's load."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from playground import Node
from waiting import limit

from kvline_contract.load import Load
from kvline_contract.names import SCALE_FILE
from kvline_contract.report import State

pytestmark = pytest.mark.integration

HOW = {
    "maxReplicas": 4,
    "targetPercent": 50,
    "scaleDownDelaySeconds": round(limit(3)),  # or a slow machine would not see two replicas
    "scaleUpPercent": 1000,
}


def load(used: int) -> Load:
    """Of a replica with 4,096 validated tokens."""
    return Load(1, 4096, used, 0, 0, 1, 0, 0, 64, False)


def wanted(space: Any) -> int:
    """Replicas of all Deployments."""
    return sum(d["spec"]["replicas"] for d in space.list("deployments"))


def follow(node: Node, space: Any, replicas: int) -> bool:
    """Validates new pods; true once so many replicas are wanted, there and ready."""
    node.play(State.VALIDATED)
    status = space.get("kvl", "chat").get("status", {})
    return bool(wanted(space) == len(node.pods()) == status.get("readyReplicas") == replicas)


def events(space: Any, reason: str) -> list[str]:
    return [e["message"] for e in space.list("events") if e["reason"] == reason]


def test_up_at_once_down_after_the_delay_and_remembered(
    space: Any, operator: Any, node: Node, until: Callable[..., Any]
) -> None:
    node.load = load(100)
    space.apply(autoscaling=HOW, replicas=3)  # spec.replicas, which has no effect
    until(lambda: follow(node, space, 1))
    until(lambda: space.condition("ScalingActive").get("reason") == "Stable")

    node.load = load(5000)  # of one replica; of two it is 10,000, and then 5 replicas would not do
    until(lambda: follow(node, space, 4))
    until(lambda: space.condition("ScalingActive").get("reason") == "AtMaximum")
    assert any(text.startswith("from 1 to ") for text in events(space, "Scaled"))
    assert space.get("kvl", "chat")["status"]["desiredReplicas"] == 4
    until(lambda: space.get("kvl", "chat")["spec"]["replicas"] == 4)

    node.load = None  # they serve, but report no load
    until(lambda: space.condition("ScalingActive").get("reason") == "DemandUnknown")
    assert space.condition("ScalingActive")["status"] == "False"
    operator.stop()
    operator.start()
    until(lambda: follow(node, space, 4))
    assert json.loads(space.get("configmap", "chat-scale")["data"]["scale.json"])["replicas"] == 4

    node.load = load(600)
    until(lambda: follow(node, space, 2), 60)  # 4 x 600 of 4,096 at half of it
    until(lambda: follow(node, space, 1), 60)
    until(lambda: space.condition("UpToDate")["status"] == "True")
    assert any(" to 1: " in text for text in events(space, "Scaled"))

    space.apply(replicas=2)  # without autoscaling spec.replicas counts again
    until(lambda: follow(node, space, 2))
    until(lambda: space.get("configmap", "chat-scale") is None)
    until(lambda: not space.condition("ScalingActive"))


def stored(space: Any) -> dict[str, Any]:
    """The autoscaler's state."""
    return dict(json.loads(space.get("configmap", "chat-scale")["data"][SCALE_FILE]))


def test_the_number_stays_without_autoscaling_and_a_second_writer_is_named(
    space: Any, operator: Any, node: Node, until: Callable[..., Any]
) -> None:
    """`kubectl scale` was taken for the number of a service that lost spec.autoscaling later."""

    def replicas() -> int:
        return int(space.get("kvl", "chat")["spec"]["replicas"])

    def named() -> bool:
        active = space.condition("ScalingActive")
        return active.get("reason") == "ForeignChange" and "kubectl" in active["message"]

    node.load = load(5000)
    space.apply(autoscaling=HOW)
    until(lambda: follow(node, space, 4))
    until(lambda: replicas() == 4)
    owners = {
        entry["manager"]: entry.get("subresource", "")
        for entry in space.get("kvl", "chat")["metadata"]["managedFields"]
        if "f:replicas" in entry["fieldsV1"].get("f:spec", {})
    }
    assert owners == {"kvline-autoscaler": "scale"}
    assert not named()

    for number in (2, 3, 2):
        space.kubectl("scale", "kvl/chat", f"--replicas={number}")
        until(lambda: replicas() == 4)
        until(lambda: stored(space)["own"])  # or the next one counts as this one
    until(named)
    space.kubectl("scale", "kvl/chat", "--replicas=1")
    until(lambda: "left to it" in space.condition("ScalingActive")["message"])
    assert replicas() == 1 and wanted(space) == 4
    space.kubectl("scale", "kvl/chat", "--replicas=4")

    def settled() -> bool:
        body = space.get("kvl", "chat")
        return bool(
            body["status"]["observedGeneration"] == body["metadata"]["generation"]
            and space.up_to_date
        )

    until(settled)
    space.apply()  # without spec.autoscaling
    until(lambda: space.get("configmap", "chat-scale") is None)
    until(settled)
    assert replicas() == wanted(space) == 4
    assert len(space.list("controllerrevisions")) == 1  # none of this makes a revision


def test_scaling_while_a_rollout_is_on_its_way(
    space: Any, operator: Any, node: Node, until: Callable[..., Any]
) -> None:
    node.load = load(100)
    space.apply(autoscaling=HOW)
    until(lambda: follow(node, space, 1))
    until(lambda: space.up_to_date)
    first = space.get("kvl", "chat")["status"]["rollout"]["stableRevision"]

    space.apply(autoscaling=HOW, engine={"maxModelLen": 512})
    until(lambda: len(node.pods()) == 2)  # the candidate's first pod, not measured yet
    node.load = load(3000)
    until(lambda: space.get("deployment", f"chat-{first}")["spec"]["replicas"] >= 2)
    until(lambda: follow(node, space, 4) and len(space.list("deployments")) == 1, 60)
    assert space.get("deployment", f"chat-{first}") is None


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"minReplicas": 5, "maxReplicas": 4}, "minReplicas must not exceed maxReplicas"),
        ({"minReplicas": 1}, "maxReplicas: Required"),
        ({"maxReplicas": 0}, "greater than or equal to 1"),
        ({"maxReplicas": 2, "targetPercent": 101}, "less than or equal to 100"),
        ({"maxReplicas": 2, "metric": "qps"}, "unknown field"),
        ({"maxReplicas": 2, "scaleUpPercent": 0}, "greater than or equal to 1"),
    ],
)
def test_what_the_schema_refuses(space: Any, how: dict[str, Any], words: str) -> None:
    refused = space.apply(autoscaling=how, check=False)
    assert refused.returncode != 0 and words in refused.stderr
