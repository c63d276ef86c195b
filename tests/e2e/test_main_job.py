"""The main job on a real node: apply, validated budget, serve, scale, refuse, kill, delete."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import describe, gone, pods, wait
from waiting import NotInTime, eventually, limit, settles

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

SAMPLES = Path(__file__).resolve().parents[2] / "manifests" / "samples"
RANDOM = {
    "model": {"source": "pvc://models/smollm2", "loadFormat": "random"},
    "engine": {"maxModelLen": 512, "maxPrefillTokens": 128, "maxRunningRequests": 4},
    "capacity": {"kvTokens": 4096},
    "resources": {"cpu": "100m", "memory": "1536Mi"},
}


def test_apply_becomes_a_validated_budget_that_serves_and_scales(space: Any, cluster: Any) -> None:
    model = {"source": "pvc://models/smollm2"}
    space.apply("smollm2", model=model, resources={"cpu": "250m", "memory": "2Gi"})
    seen = set()

    def watch() -> bool:
        seen.add(space.condition("Ready", "smollm2").get("reason"))
        return bool(space.condition("Ready", "smollm2").get("status") == "True")

    try:
        eventually(watch, 240, on="pod")
    except NotInTime as error:
        raise NotInTime(f"{error}\n{describe(space, 'smollm2')}") from None
    assert {"Stressing", "Validating"} <= seen
    capacity = space.get("kvl", "smollm2")["status"]["capacity"]
    assert capacity["kvTokens"] > 10_000
    assert capacity["fullLengthSequences"] == capacity["kvTokens"] // 8192
    memory = dict(capacity["memory"])
    assert sum(part["mib"] for part in memory.pop("parts")) == memory["totalMiB"]
    assert memory.pop("totalMiB") == 2048 == sum(memory.values())
    assert memory["headroomMiB"] <= 32 + 64  # idle after validation

    answers_of_smollm2(space, "smollm2")
    ip = space.get("service", "smollm2")["spec"]["clusterIP"]
    distinct_lengths_take_no_memory(space, cluster, ip)
    words = ("-n", "kvline-system", "get", "service", "kvline-page")
    page = cluster.kubectl(*words, "-o", "jsonpath={.spec.clusterIP}").stdout
    shown = cluster.network.run(["curl", "-sf", f"http://{page}/services/team/smollm2"]).stdout
    assert f"{capacity['kvTokens']:,}" in shown and "Serving" in shown

    space.kubectl("scale", "kvl", "smollm2", "--replicas=2")
    eventually(
        lambda: space.get("kvl", "smollm2")["status"].get("readyReplicas") == 2, 240, on="pod"
    )
    wait(space, "smollm2", "UpToDate", status="True")

    capacity = settles(
        lambda: dict(space.get("kvl", "smollm2")["status"]["capacity"]),
        lambda found: found["kvTokensTotal"] >= 2 * found["kvTokens"],  # of both
        on="pod",
    )
    assert capacity["kvTokens"] > 10_000
    # The second replica started from the first one's record.
    assert capacity["spread"]["min"] == capacity["spread"]["max"]
    assert space.condition("CapacityStable", "smollm2")["reason"] == "Stable"
    space.kubectl("scale", "kvl", "smollm2", "--replicas=0")
    wait(space, "smollm2", "Ready", reason="ScaledToZero")


def test_the_readme_s_own_service_serves_as_it_stands(space: Any) -> None:
    space.kubectl("apply", "-f", str(SAMPLES / "chat.yaml"))
    wait(space, "chat", "UpToDate", status="True")
    status = space.get("kvl", "chat")["status"]
    assert status["capacity"]["kvTokens"] >= 16_000 and status["readyReplicas"] == 1


SCORED = [-11.5498, -0.3397, -2.4214, -0.4495]  # in float32, of «The capital of France is»


def answers_of_smollm2(space: Any, name: str) -> None:
    """Through the Service, to the unchanged openai client; greedy."""
    ip = space.get("service", name)["spec"]["clusterIP"]
    client = str(Path(__file__).parent / "client.py")
    command = [sys.executable, client, f"http://{ip}:8000", name]
    done = space.cluster.network.run(command, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    answers = json.loads(done.stdout)
    assert answers["models"] == [name]
    assert answers["chat"] == answers["streamed"] == "The capital of France is Paris."
    assert answers["completions"][0].startswith(" Paris")
    assert answers["echo"] == "The capital of France is"
    first, *scored = answers["scored"]
    assert first is None and scored == pytest.approx(SCORED, abs=1e-3)
    assert "max_tokens" in answers["refused"]


def distinct_lengths_take_no_memory(space: Any, cluster: Any, ip: str) -> None:
    """In a container at its validated budget: each new length once took 3 MiB of it for good."""
    crowd = str(Path(__file__).parent / "crowd.py")
    (pod,) = pods(space)
    code = "from kvline_server.memory.device import cpu_device; print(cpu_device(None, 1).used())"

    def used(first: int, step: int) -> int:
        words = [sys.executable, crowd, "lengths", ip, "smollm2", str(first), str(step)]
        assert set(json.loads(cluster.network.run(words).stdout)) == {"200"}
        inside = ("exec", pod["metadata"]["name"], "-c", "server", "--", "python3", "-c", code)
        return int(space.kubectl(*inside).stdout)

    before = used(16, 80)
    after = used(3, 4)  # 64 of them
    assert after - before < 16 << 20, (before, after)
    (pod,) = pods(space)
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 0


def test_a_pinned_random_model_is_validated_and_delete_leaves_nothing(
    space: Any, cluster: Any
) -> None:
    """F57: in a pod with a read-only root file system, a uid without an entry in the password file,
    Pod Security restricted. Traffic goes nowhere but to the three routes."""
    space.apply("plan", **RANDOM)
    wait(space, "plan", "Ready", status="True")
    status = space.get("kvl", "plan")["status"]
    assert status["capacity"]["source"] == "Pinned"
    assert status["capacity"]["kvTokens"] == 4096
    pod = pods(space)[0]
    assert pod["spec"]["containers"][0]["securityContext"]["readOnlyRootFilesystem"]
    who = space.kubectl("exec", pod["metadata"]["name"], "--", "id", "-u").stdout
    assert who.strip() == "65532"
    only_the_routes(space, cluster)
    space.kubectl("delete", "kvl", "plan", f"--timeout={limit(30):.0f}s")
    gone(space)
    for kind in ("deployments", "services", "controllerrevisions", "networkpolicies", "pdb"):
        assert space.list(kind) == []
    assert [c["metadata"]["name"] for c in space.list("configmaps")] == ["kube-root-ca.crt"]


def only_the_routes(space: Any, cluster: Any) -> None:
    ip = space.get("service", "plan")["spec"]["clusterIP"]
    for path, code in (("/v1/models", "200"), ("/metrics", "404"), ("/sizing", "404")):
        words = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", f"http://{ip}:8000{path}"]
        assert cluster.network.run(words).stdout == code
    internal = ["curl", "-s", "--max-time", "2", f"http://{ip}:8001/sizing"]
    assert subprocess.run(cluster.network.command(internal), check=False).returncode != 0


def test_the_operator_restarted_while_a_pod_sizes_itself_changes_nothing(
    space: Any, cluster: Any
) -> None:
    """The pod continues, and the restarted operator takes over what it finds."""
    space.apply("plan", **{**RANDOM, "capacity": {}})
    wait(space, "plan", "ModelAvailable", status="True")
    before = pods(space)[0]["metadata"]["uid"]
    selector = "app.kubernetes.io/name=kvline-operator"
    cluster.kubectl("-n", "kvline-system", "delete", "pod", "-l", selector, "--wait=false")
    wait(space, "plan", "Ready", status="True")
    assert [p["metadata"]["uid"] for p in pods(space)] == [before]
    assert pods(space)[0]["status"]["containerStatuses"][0]["restartCount"] == 0


def test_too_little_memory_is_explained_in_the_status(space: Any) -> None:
    small = {**RANDOM, "resources": {"cpu": "100m", "memory": "640Mi"}, "capacity": {}}
    space.apply("small", **small)
    condition = wait(space, "small", "CapacityMeasured", reason="OutOfMemory")
    assert "spec.resources.memory" in condition["message"]
    shown = space.kubectl("describe", "kvl", "small").stdout
    assert "OutOfMemory" in shown and "MiB" in shown


# Fills the container's memory beside the engine, which stays the largest process of it.
HOGS = """
import os, time
for _ in range(60):
    if not os.fork():
        kept = b"x" * (32 << 20)
        time.sleep(60)
        os._exit(0)
    time.sleep(0.05)
time.sleep(60)
"""


@pytest.mark.fault(
    "F32",
    shows="an engine that the kernel kills for memory while it serves: exit 51 (cgroup v2: the "
    "container OOMKilled), the reason, and it comes back",
)
def test_an_engine_killed_for_memory_while_serving_is_named_and_comes_back(space: Any) -> None:
    space.apply("plan", **RANDOM)
    wait(space, "plan", "Ready", status="True")
    name = pods(space)[0]["metadata"]["name"]
    space.kubectl("exec", name, "--", "/opt/kvline/bin/python", "-c", HOGS, check=False)

    def ended() -> Any:
        found = pods(space)[0]["status"]["containerStatuses"][0]
        return (found.get("lastState") or {}).get("terminated")

    last = eventually(ended, 60, on="pod")
    if last["exitCode"] == 137:  # cgroup v2 kills the container's processes together
        assert last["reason"] == "OOMKilled"
    else:
        assert last["exitCode"] == 51, last
        ended_with = json.loads(last["message"])
        assert ended_with["name"] == "OutOfMemoryServing"
        assert "killed for host memory in state Validated" in ended_with["message"]
    wait(space, "plan", "Ready", status="True")


@pytest.mark.fault(
    "F32", shows="a container filled beyond its limit is killed by the kernel and explained"
)
def test_a_container_over_its_limit_is_retried_smaller_not_crash_looped(space: Any) -> None:
    """A pinned budget that does not fit fills the container: the kernel kills it, and the status
    explains that."""
    huge = {**RANDOM, "capacity": {"kvTokens": 40_000}}
    space.apply("huge", **huge)
    condition = wait(space, "huge", "CapacityMeasured", reason="OutOfMemory")
    assert "kvTokens pins" in condition["message"]
    space.apply("huge", **RANDOM)  # F37: the good spec serves without further action
    wait(space, "huge", "Ready", status="True")
