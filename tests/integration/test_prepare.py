"""A Job downloads the model, or pulls the image, before pods are created and before serving ones
are removed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from playground import Node, eventually
from rolling import Service, up_to_date

from kvline_contract.report import State

pytestmark = pytest.mark.integration

MODEL = {
    "source": "hf://org/name@" + "0" * 40,
    "cache": {"claim": "cache"},
    "tokenSecret": {"name": "hub", "key": "token"},
}
POLICIES = ("chat", "chat-prepare")


def test_a_model_is_downloaded_once_for_all_and_its_failure_is_reported(
    space: Any, operator: Any, node: Node
) -> None:
    """Two replicas, one Job, and only the Job has the token."""
    node.fetches = False
    space.apply(model=MODEL, replicas=2)
    (pod,) = eventually(node.jobs)
    node.patch(pod, started("download", {"running": {"startedAt": "2026-11-21T10:00:00Z"}}))
    eventually(lambda: space.condition("Ready").get("reason") == "Downloading")
    assert "downloads hf://org/name@" in space.condition("ModelAvailable")["message"]
    assert '"hub"' in json.dumps(pod["spec"])
    (deployment,) = space.list("deployments")
    assert deployment["spec"]["replicas"] == 0 and node.pods() == []
    assert '"hub"' not in json.dumps(deployment)
    ways_out = {n: space.get("networkpolicies", n)["spec"].get("egress") for n in POLICIES}
    assert ways_out["chat"] is None and ways_out["chat-prepare"][1]["ports"][0]["port"] == 443

    node.end_job(pod, 33, "downloading org/name: ConnectTimeout")
    eventually(lambda: space.condition("ModelAvailable").get("reason") == "DownloadFailed")
    assert "ConnectTimeout" in space.condition("ModelAvailable")["message"]
    assert node.pods() == []
    (job,) = space.list("jobs")
    space.kubectl("delete", "job", job["metadata"]["name"])  # a deleted Job is created again

    node.fetches = True

    def served() -> bool:
        node.play(State.VALIDATED)
        return bool(space.up_to_date)

    eventually(served, 60)
    assert len(node.pods()) == 2
    assert len(space.list("jobs")) == 1


@pytest.mark.fault(
    "F30", shows="Recreate keeps what serves while a Job cannot pull the new image, and says so"
)
def test_an_image_that_cannot_be_pulled_takes_nothing_away(service: Service, space: Any) -> None:
    """Recreate: a misspelt image removes no serving replica and leaves nothing behind."""
    first, node = service.stable(), service.node
    before = {p["metadata"]["uid"] for p in node.pods()}
    node.fetches = False
    how = {"strategy": "Recreate"}
    space.apply(replicas=2, rollout=how, image="localhost/none@sha256:" + "d" * 64)
    (pod,) = eventually(node.jobs)
    waiting = {"reason": "ImagePullBackOff", "message": "not found"}
    node.patch(pod, started("server", {"waiting": waiting}))
    pulls = "ImagePullBackOff: not found"
    status = service.until(lambda s: pulls in up_to_date(s).get("message", ""))
    assert up_to_date(status)["reason"] == "GateHeld"
    assert space.condition("Progressing")["reason"] == "ImagePullFailed"
    assert space.condition("Ready")["status"] == "True"
    assert {p["metadata"]["uid"] for p in node.pods()} == before

    space.apply(replicas=2, rollout=how)  # the old spec again
    service.until_reason("UpToDate")
    eventually(lambda: not space.list("jobs"))
    assert service.stable() == first and service.fewest_ready == 2


def started(name: str, state: dict[str, Any]) -> dict[str, Any]:
    """The status of a Job's pod that is bound to a node."""
    container = {
        "name": name,
        "ready": False,
        "restartCount": 0,
        "image": "x",
        "imageID": "",
        "state": state,
    }
    phase = "Running" if "running" in state else "Pending"
    return {"phase": phase, "conditions": [], "containerStatuses": [container]}
