"""Pods that are no replicas: terminal ones, and foreign pods with our labels."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from playground import serve
from rolling import Service, up_to_date
from waiting import eventually

from kvline_contract.launch import GateFile
from kvline_contract.names import GATE_FILE, LABEL_REVISION, LABEL_SERVICE, gate_name
from kvline_contract.report import State, Termination

pytestmark = pytest.mark.integration

LOW = "The node was low on resource: memory."
# Ends one after another, and what UpToDate says then; the last is an answer to a probe's SIGTERM.
NOT_THE_ENGINE_S = (
    (137, "killed (code 137)"),
    (22, "SecretMissing"),
    (143, "killed (code 143)"),
    (30, "ModelNotFound"),
    (137, "killed (code 137)"),
    (43, "DeviceFailure"),
    (127, "not started"),
    (128, "not started"),
    (255, "not started"),
    (45, "NoProgress"),
    (0, "killed (code 0)"),
)
REFUSED = (
    "Allocate failed due to requested number of devices unavailable for nvidia.com/gpu. "
    "Requested: 1, Available: 0, which is unexpected"
)


def ended(space: Any) -> list[dict[str, Any]]:
    return [p for p in space.list("pods") if p["status"]["phase"] == "Failed"]


def named(words: str, status: dict[str, Any]) -> bool:
    return words in up_to_date(status)["message"]


def test_an_evicted_pod_is_no_replica_and_ends_no_candidate(service: Service, space: Any) -> None:
    """After an eviction the replacement serves; a candidate that was evicted, killed by the kubelet
    several times, held by a code and ended by a probe, is not rejected and is measured later."""
    service.node.end(service.node.pods()[0], "Evicted", LOW)
    both = {"endedPods": 1, "replicas": 2, "readyReplicas": 2}
    service.until(lambda s: both.items() <= s.items() and space.up_to_date)

    space.apply(replicas=2, engine={"maxModelLen": 2048})
    candidate = service.candidate()
    (pod,) = service.until_pods(candidate, 1)
    service.node.end(pod, "Evicted", LOW)
    service.until(lambda s: s["endedPods"] == 2)
    (pod,) = service.until_pods(candidate, 1)
    service.node.bind(pod)  # or UpToDate would say that it has no node
    for code, words in NOT_THE_ENGINE_S:
        service.node.crash(pod, code, "")
        service.until(partial(named, words))
    own = Termination(1, 40, "OutOfMemory", "40 MiB short")
    service.node.crash(pod, 40, own.dumps())  # its engine's first failure
    status = service.until(lambda s: s.get("diagnosis", {}).get("code") == 40)
    assert status["rollout"].get("candidateRevision") == candidate, up_to_date(status)
    service.tokens[candidate] = 4096
    status = service.until_reason("UpToDate")
    assert status["rollout"]["stableRevision"] == candidate
    assert service.fewest_ready >= 1


def test_a_node_that_refuses_pods_leaves_ten_of_them_and_is_named(
    space: Any, operator: Any, node: Any, until: Callable[..., Any]
) -> None:
    """F34: a GPU that the kubelet cannot allocate makes failed pods without end; at most ten of
    them stay in the cluster, and the condition is DeviceFailure."""
    gpu = {"memory": "2Gi", "gpus": 1}
    image = "registry.example/server@sha256:" + "0" * 64
    space.apply(resources=gpu, image=image, replicas=4)
    for _ in range(3):
        for pod in until(lambda: len(found := node.pods()) == 4 and found):
            node.end(pod, "UnexpectedAdmissionError", REFUSED)
    until(lambda: len(node.pods()) == 4)
    until(lambda: len(ended(space)) == 10)
    for pod in node.pods():
        node.bind(pod)
    until(lambda: space.condition("Progressing").get("reason") == "DeviceFailure")
    assert REFUSED in space.condition("Progressing")["message"]
    node.play(State.VALIDATED)
    until(lambda: space.condition("Progressing").get("reason") == "Complete")
    status = space.get("kvl", "chat")["status"]
    assert (status["replicas"], status["endedPods"]) == (4, 10)


def test_foreign_pods_with_our_labels_do_not_count(
    space: Any, operator: Any, node: Any, until: Callable[..., Any]
) -> None:
    """A pod without an owner, and one of a ReplicaSet with a name like ours; both ready, both with
    a report of few tokens."""
    serve(space, node)
    (own,) = node.pods()
    (deployment,) = space.list("deployments")
    labels = {**deployment["spec"]["template"]["metadata"]["labels"], "stranger": "yes"}
    template = {
        "metadata": {"labels": labels},
        "spec": {"containers": [{"name": "server", "image": "x"}]},
    }
    bare = {"apiVersion": "v1", "kind": "Pod", **template}
    bare["metadata"] = {"name": "bare", "labels": {**labels, "stranger": "alone"}}
    name = f"{deployment['metadata']['name']}-5d4f8"
    copied = {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "metadata": {"name": name},
        "spec": {"replicas": 1, "selector": {"matchLabels": labels}, "template": template},
    }
    for item in (bare, copied):
        space.kubectl("create", "-f", "-", input=json.dumps(item))
    until(lambda: len(node.pods()) == 3)
    node.play(State.VALIDATED, 64, ready=True, only=lambda pod: pod != own)
    space.apply(rollout={"minCapacityPercent": 90})
    seen = space.get("kvl", "chat")["metadata"]["generation"]
    until(lambda: space.get("kvl", "chat")["status"]["observedGeneration"] == seen)
    status = space.get("kvl", "chat")["status"]
    assert (status["replicas"], status["readyReplicas"]) == (1, 1)
    assert status["capacity"]["kvTokens"] == 4096 and space.up_to_date
    assert [r["pod"] for r in status["replicaSizing"]] == [own["metadata"]["name"]]


def test_a_candidate_that_waits_for_what_a_terminating_pod_holds_is_not_unschedulable(
    space: Any, node: Any, operator: Any
) -> None:
    """Recreate on a single GPU: the routine wait was reported as «no node fits a replica»."""
    serve(space, node)
    (old,) = node.pods()
    node.bind(old)  # so that only a kubelet, or force, removes it
    space.apply(engine={"maxModelLen": 2048}, rollout={"strategy": "Recreate"})

    def candidates() -> list[dict[str, Any]]:
        node.fetch()
        return [p for p in node.pods() if p["metadata"]["name"] != old["metadata"]["name"]]

    (new,) = eventually(candidates)  # the prepare Job's pod had no node either
    earlier = [e["metadata"]["uid"] for e in space.list("events")]
    full = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    full["message"] = "0/1 nodes are available: 1 Insufficient nvidia.com/gpu"
    node.patch(new, {"phase": "Pending", "conditions": [full]})
    waits = f"has no node until {old['metadata']['name']} has left one: "
    eventually(lambda: waits in space.condition("Ready")["message"])
    progressing = space.condition("Progressing")
    assert progressing["reason"] == "RollingOut" and waits in progressing["message"]
    assert waits in space.condition("UpToDate")["message"]
    # Its wait for clients serves nobody, and the candidate waits for its GPU.
    notice = (node.addresses[old["metadata"]["uid"]], "/prestop/end")
    eventually(lambda: notice in node.posts)
    labels = old["metadata"]["labels"]
    file = space.get("configmap", gate_name(labels[LABEL_SERVICE], labels[LABEL_REVISION]))
    assert GateFile.parse(file["data"][GATE_FILE]).knows(node.posts[notice])
    since = [e for e in space.list("events") if e["metadata"]["uid"] not in earlier]
    # The scheduler of this control plane has no nodes, which it may write first.
    since = [e for e in since if "no nodes available" not in e["message"]]
    assert not {"Unschedulable", "GateHeld"} & {e["reason"] for e in since}
    # On a slow machine its grace period has passed by then, and the garbage collector took it.
    force = ("--force", "--grace-period=0", "--ignore-not-found")
    space.kubectl("delete", "pod", old["metadata"]["name"], *force)
    eventually(lambda: space.condition("Progressing")["reason"] == "Unschedulable")
