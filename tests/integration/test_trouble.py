"""What keeps pods from serving, as a user sees it: by conditions and `kubectl kvline explain`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from playground import Node
from waiting import eventually
from webhook import Webhook

from kvline_contract.report import State

pytestmark = pytest.mark.integration

CAUSE = "MountVolume.SetUp failed for volume models: exit status 32: access denied by server"


def test_a_volume_that_is_never_mounted_is_explained_by_its_event(
    space: Any, operator: Any, node: Node
) -> None:
    """F69: a pod without its volume is named by its condition, and explained by its event."""
    space.apply()
    (pod,) = eventually(node.pods)
    node.bind(pod)
    since = "2026-01-01T00:00:00Z"
    creating = {"waiting": {"reason": "ContainerCreating"}}
    waits = {"type": "PodReadyToStartContainers", "status": "False", "lastTransitionTime": since}
    server = {"name": "server", "state": creating, "ready": False, "restartCount": 0}
    server |= {"image": "", "imageID": ""}
    node.patch(pod, {"phase": "Pending", "conditions": [waits], "containerStatuses": [server]})
    eventually(lambda: space.condition("Progressing").get("reason") == "PodNotSetUp")
    assert space.condition("Ready")["reason"] == "PodNotSetUp"
    name = pod["metadata"]["name"]
    assert f"describe pod {name}" in space.condition("Ready")["message"]
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": "mount"},
        "involvedObject": {"kind": "Pod", "name": name, "namespace": space.name},
        "reason": "FailedMount",
        "type": "Warning",
        "message": CAUSE,
    }
    space.kubectl("create", "-f", "-", input=json.dumps(event))
    output = space.kvline("explain", "chat").stdout
    assert output.index("Progressing: PodNotSetUp") < output.index("access denied by server")
    assert "NetworkPolic" not in output and "CapacityMeasured" not in output
    node.play(State.VALIDATED)
    eventually(lambda: space.condition("Progressing").get("reason") == "Complete")


def test_a_secret_that_is_there_at_last_is_missing_no_longer(
    space: Any, operator: Any, node: Node
) -> None:
    """F71: SecretMissing names the Secret, and goes while the next start loads."""
    space.apply(access={"apiKeySecretRef": {"name": "keys", "key": "key"}})
    (pod,) = eventually(node.pods)
    node.bind(pod)
    node.crash(pod, 22, "/etc/kvline/access/key: no key")
    eventually(lambda: space.condition("ModelAvailable").get("reason") == "SecretMissing")
    assert f"Secret keys of namespace {space.name}" in space.condition("Ready")["message"]
    output = space.kvline("explain", "chat").stdout
    assert "ModelAvailable: SecretMissing" in output and "CapacityMeasured" not in output
    node.play(State.LOADING)
    eventually(lambda: space.condition("ModelAvailable").get("reason") == "Loading")
    assert space.condition("ModelAvailable")["status"] == "Unknown"
    node.play(State.STRESSING)
    eventually(lambda: space.condition("ModelAvailable")["status"] == "True")
    assert space.condition("Ready")["reason"] == "Stressing"


def test_a_pod_that_others_gate_is_held_until_they_let_it_go(
    space: Any, operator: Any, node: Node, tmp_path: Path
) -> None:
    """F69: a queue such as Kueue adds a gate to pods at admission: the condition has its name, and
    the claim's that is missing afterwards."""
    gate = {"name": "kueue.x-k8s.io/admission"}
    webhook = Webhook(space, tmp_path)
    webhook.change = lambda body: [{"op": "add", "path": "/spec/schedulingGates", "value": [gate]}]
    webhook.install("pods")
    try:
        space.apply()
        (pod,) = eventually(node.pods)
    finally:
        webhook.remove()
        webhook.close()
    assert pod["spec"]["schedulingGates"] == [gate]
    eventually(lambda: space.condition("Ready").get("reason") == "SchedulingGated")
    assert "kueue.x-k8s.io/admission" in space.condition("Progressing")["message"]
    output = space.kvline("explain", "chat").stdout
    assert "Progressing: SchedulingGated" in output and "CapacityMeasured" not in output
    # What the scheduler writes of a missing claim; a gated pod it leaves alone.
    lack = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    lack["message"] = '0/1 nodes are available: persistentvolumeclaim "models" not found.'
    node.patch(pod, {"phase": "Pending", "conditions": [lack]})
    wanted = f"claim models does not exist in namespace {space.name}"
    eventually(lambda: space.condition("Ready").get("message") == wanted)
    assert space.condition("ModelAvailable")["reason"] == "ClaimMissing"
    output = space.kvline("explain", "chat").stdout
    assert wanted in output and "create the claim" in output and "Progressing:" not in output
    space.kubectl(
        "patch", "pod", pod["metadata"]["name"], "-p", '{"spec":{"schedulingGates":null}}'
    )
    # The scheduler of this control plane has no nodes.
    eventually(lambda: space.condition("Ready").get("reason") == "Unschedulable")
