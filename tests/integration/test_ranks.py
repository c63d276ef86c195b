"""Replicas of several ranks: their memory in the status, their records, and the gate."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from playground import Node, Space
from rolling import Service

from kvline_contract.memory import Memory, Part
from kvline_contract.names import CPU_RANK, gate_name
from kvline_contract.report import State

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]
Object = dict[str, Any]
DIGEST = "localhost/kvline-server@sha256:" + "a" * 64
CPU = {"memory": "2Gi", "gpuResource": CPU_RANK}


def rank(headroom: int, gpu: int | None = None) -> Memory:
    parts = (Part("kv-cache", 60), Part("headroom", headroom), Part("others", 40 - headroom))
    return Memory(100, parts, gpu)


def records(space: Space) -> Object:
    found = space.get("configmap", "chat-records")
    return dict(json.loads(found["data"]["records.json"])["records"]) if found else {}


@pytest.mark.parametrize(
    ("resources", "device", "gpus"),
    [
        ({"memory": "4Gi", "gpus": 2}, "cuda", [0, 1]),
        ({**CPU, "gpus": 2}, "cpu", [None, None]),
    ],
    ids=["gpus", "cpu-ranks"],
)
def test_two_ranks_reach_the_status_and_every_reader(
    space: Space,
    operator: Any,
    node: Node,
    until: Callable[..., Any],
    resources: Object,
    device: str,
    gpus: list[int | None],
) -> None:
    """A neighbour on the second device lowers the figure of both, and is found by it."""
    node.ranks = (rank(30, gpus[0]), rank(5, gpus[1]))
    space.apply(resources=resources, image=DIGEST)
    (pod,) = until(node.pods)
    launch = node.launch(pod)
    assert launch is not None and (launch.device, launch.tensor_parallel) == (device, 2)
    limits = pod["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"memory": resources["memory"]} | (
        {"nvidia.com/gpu": "2"} if device == "cuda" else {}
    )
    node.play(State.VALIDATED)
    until(lambda: space.up_to_date)
    body = space.get("kvl", "chat")
    assert body is not None
    capacity = body["status"]["capacity"]
    assert (capacity["kvTokens"], capacity["bindingRank"]) == (4096, 1)
    assert [item.get("gpu") for item in capacity["ranks"]] == gpus
    left = [
        p["mib"] for item in capacity["ranks"] for p in item["parts"] if p["name"] == "headroom"
    ]
    assert left == [30, 5] and capacity["memory"]["headroomMiB"] == 5
    name = "GPU 1 (rank 1 of 2)" if device == "cuda" else "rank 1 of 2"
    assert f"; {name} has the least" in space.condition("CapacityMeasured")["message"]
    assert "rank 0" not in (wide := space.kubectl("get", "kvl", "-o", "wide").stdout), wide
    title = f"{name}: the least memory left"
    assert title in space.kvline("explain", "chat").stdout
    assert title in space.kvline("status", "chat").stdout
    (record,) = until(lambda: records(space).values())
    assert record["ranks"] == 2


def test_another_number_of_ranks_is_held_and_has_its_own_record(
    space: Space, service: Service, node: Node
) -> None:
    """Two ranks hold more tokens than one, which shows nothing about whether any were lost."""
    first = service.stable()
    space.apply(replicas=2, resources={**CPU, "gpus": 2})
    second = service.candidate()
    service.tokens[second] = 9000
    status = service.until(lambda s: s["rollout"].get("gate", {}).get("measured") == 9000)
    assert space.condition("UpToDate")["reason"] == "GateHeld"
    gate = status["rollout"]["gate"]
    assert gate["result"] == "Held"
    assert not {"required", "baseline"} & set(gate)
    assert "a replica has 2 CPU ranks, not a CPU" in gate["message"]
    assert "set spec.capacity.minKVTokens" in gate["message"]
    file = space.get("configmap", gate_name("chat", second))
    assert file is not None and json.loads(file["data"]["gate.json"])["requiredKVTokens"] == 0
    assert service.stable() == first and len(service.pods_of(first)) == 2

    space.apply(replicas=2, resources={**CPU, "gpus": 2}, capacity={"minKVTokens": 8000})
    status = service.until(lambda s: s["rollout"]["stableRevision"] == second)
    assert status["rollout"]["gate"]["result"] == "Passed"
    assert service.fewest_ready >= 2
    service.until_reason("UpToDate")
    kept = records(space)
    assert sorted(r.get("ranks", 1) for r in kept.values()) == [1, 2]
    assert {r.get("ranks", 1): r["kvTokens"] for r in kept.values()} == {1: 4096, 2: 9000}
    assert space.condition("CapacityStable")["reason"] == "Stable"

    # From here on the same number is compared again.
    again = {"maxPrefillTokens": 1024}
    space.apply(replicas=2, resources={**CPU, "gpus": 2}, engine=again)
    service.tokens[service.candidate()] = 8000
    gate = service.until_reason("RevisionRejected")["rollout"]["gate"]
    assert (gate["measured"], gate["required"], gate["baseline"]) == (8000, 8550, 9000)


def test_a_lost_rank_holds_and_is_named_until_the_pod_is_measured_again(
    space: Space, service: Service, node: Node
) -> None:
    space.apply(replicas=2, resources={**CPU, "gpus": 2}, capacity={"minKVTokens": 1})
    second = service.candidate()
    (pod,) = service.until_pods(second, 1)
    for _ in range(3):
        node.crash(pod, 44, "GPU 1 (rank 1 of 2) does not answer")
    service.until(lambda s: space.condition("Progressing")["reason"] == "RankLost")
    assert "GPU 1 (rank 1 of 2)" in space.condition("Progressing")["message"]
    status = service.until_reason("GateHeld")
    assert status["rollout"]["gate"]["result"] == "Held" and service.fewest_ready >= 2
    service.tokens[second] = 9000
    service.until_reason("UpToDate")
    # The scheduler may still call a pod unschedulable that the node of these tests has started.
    service.until(lambda s: space.condition("Progressing")["reason"] == "Complete")
