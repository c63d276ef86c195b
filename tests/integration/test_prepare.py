"""A Job downloads the model, or pulls the image and checks the model, before pods are created and
before serving ones are removed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from playground import Node
from rolling import Service, up_to_date
from servers import CONFIG
from waiting import eventually, limit

from kvline_contract.report import State

pytestmark = pytest.mark.integration

MODEL = {
    "source": "hf://org/name@" + "0" * 40,
    "cache": {"claimName": "cache"},
    "tokenSecretRef": {"name": "hub", "key": "token"},
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


def test_a_model_that_is_not_there_takes_nothing_away(
    service: Service, space: Any, tmp_path: Path
) -> None:
    """Recreate: the real check runs for the Job's pod and ends with 30; then the right folder."""
    first, node = service.stable(), service.node
    before = {p["metadata"]["uid"] for p in node.pods()}
    (tmp_path / "right").mkdir()
    (tmp_path / "right" / "config.json").write_text(json.dumps(CONFIG))
    node.fetches = False
    how = {"replicas": 2, "rollout": {"strategy": "Recreate"}, "capacity": {"minKVTokens": 4096}}
    space.apply(model={"source": "pvc://models/wrong", "loadFormat": "random"}, **how)
    (pod,) = eventually(node.jobs)
    code, text = run_check(space, pod, tmp_path)
    assert code == 30
    node.end_job(pod, code, text)
    missing = "wrong: no such folder (spec.model.source pvc://models/wrong)"
    status = service.until(lambda s: missing in up_to_date(s).get("message", ""))
    assert up_to_date(status)["reason"] == "GateHeld"
    assert space.condition("ModelAvailable")["reason"] == "NotFound"
    assert missing in space.condition("ModelAvailable")["message"]
    assert space.condition("Ready")["status"] == "True"
    assert {p["metadata"]["uid"] for p in node.pods()} == before

    space.apply(model={"source": "pvc://models/right", "loadFormat": "random"}, **how)
    (pod,) = eventually(lambda: [p for p in node.jobs() if revision_of(p) != revision_of(pod)])
    assert {p["metadata"]["uid"] for p in node.pods()} == before
    code, text = run_check(space, pod, tmp_path)
    assert code == 0, text
    node.end_job(pod, code, "")
    second = service.candidate()
    service.tokens[second] = 4096
    service.until_reason("UpToDate")
    assert service.stable() == second != first


def run_check(space: Any, pod: dict[str, Any], models: Path) -> tuple[int, str]:
    """Runs a Job's container here, with `models` as the claim: its exit code and its errors."""
    spec = pod["spec"]
    volumes = {v["name"]: v for v in spec["volumes"]}
    assert volumes["models"]["persistentVolumeClaim"]["readOnly"]
    launch = space.get("configmaps", volumes["launch"]["configMap"]["name"])["data"]
    config = models / "launch.json"
    config.write_text(launch["launch.json"].replace('"/models/', f'"{models}/'))
    command, flag = spec["containers"][0]["args"]
    assert flag == "--config=/etc/kvline/launch/launch.json"
    words = [sys.executable, "-m", "kvline_server", command, f"--config={config}"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=limit(60), check=False)
    return done.returncode, done.stderr


def revision_of(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["labels"]["kvline.dev/revision"])


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
