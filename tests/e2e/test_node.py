"""Faults that need a node: an image that does not exist, no GPU, a drain, an early delete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import build
import pytest
from support import pods, wait
from test_main_job import RANDOM
from traffic import streaming
from waiting import eventually, limit

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NOWHERE = "localhost/kvline-server@sha256:" + "0" * 64
NODE = "local"


def serving(space: Any) -> int:
    return int(space.get("kvl", "steady")["status"].get("readyReplicas", 0))


@pytest.mark.fault("F30", shows="an image that is nowhere changes nothing, under streams")
@pytest.mark.fault("F33", shows="a GPU that is not free changes nothing, under streams")
@pytest.mark.fault(
    "F35",
    shows="a drain of the only node takes one replica of two and no more; 0 failed streams",
)
def test_what_a_node_cannot_give_and_a_drain_fail_no_request(
    space: Any, cluster: Any, tmp_path: Path
) -> None:
    space.apply("steady", **RANDOM, replicas=2)
    wait(space, "steady", "UpToDate", status="True")
    ip = space.get("service", "steady")["spec"]["clusterIP"]
    with streaming(cluster.network, ip, "steady", tmp_path, 2) as running:
        before = {p["metadata"]["uid"] for p in pods(space)}
        neither_image_nor_gpu(space)
        assert {p["metadata"]["uid"] for p in pods(space)} == before
        drained(space, cluster)
    assert running.failures == [] and running.ended


def neither_image_nor_gpu(space: Any) -> None:
    space.apply("steady", **RANDOM, replicas=2, image=NOWHERE)
    progressing = wait(space, "steady", "Progressing", reason="ImagePullFailed")
    assert NOWHERE in progressing["message"]
    assert serving(space) == 2

    needy = {**RANDOM, "resources": {"cpu": "100m", "memory": "2Gi", "gpus": 1}}
    space.apply("steady", **needy, replicas=2, image=NOWHERE)
    progressing = wait(space, "steady", "Progressing", reason="Unschedulable")
    assert "Insufficient nvidia.com/gpu" in progressing["message"]
    assert serving(space) == 2

    space.apply("steady", **RANDOM, replicas=2)
    wait(space, "steady", "UpToDate", status="True")


def drained(space: Any, cluster: Any) -> None:
    """Of the only node, so that the first evicted replica stays missing until the node is back."""
    words = ("--pod-selector=kvline.dev/service=steady", "--delete-emptydir-data")
    done = cluster.kubectl("drain", NODE, *words, f"--timeout={limit(25):.0f}s", check=False)
    try:
        assert done.returncode != 0 and "disruption budget" in done.stderr, done.stderr
        assert serving(space) == 1
    finally:
        cluster.kubectl("uncordon", NODE)
    eventually(lambda: serving(space) == 2, 120, on="pod")
    wait(space, "steady", "UpToDate", status="True")


SLOW = "import pathlib, time; pathlib.Path('/tmp/starts').touch(); time.sleep(300)"


@pytest.mark.parametrize("component", build.COMPONENTS)
def test_a_pod_that_is_deleted_while_python_starts_leaves_at_once(
    space: Any, tmp_path: Path, component: str
) -> None:
    """The kernel drops a signal that a container's first process has no handler for: where Python
    was that, a pod deleted as it started stayed for its grace period. Here its start is long."""
    name = f"early-{component}"
    folder = {"name": "slow", "mountPath": "/slow"}
    container = {
        "name": component,
        "image": build.image_name(component),
        "env": [{"name": "PYTHONPATH", "value": "/slow"}],
        "readinessProbe": {"exec": {"command": ["test", "-e", "/tmp/starts"]}, "periodSeconds": 1},
        "volumeMounts": [folder],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "terminationGracePeriodSeconds": 600,
            "securityContext": {
                "runAsNonRoot": True,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": [{"name": "slow", "configMap": {"name": name}}],
        },
    }
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    (tmp_path / "pod.json").write_text(json.dumps(pod))
    space.kubectl("create", "configmap", name, f"--from-file={tmp_path / 'sitecustomize.py'}")
    space.kubectl("create", "-f", str(tmp_path / "pod.json"))
    space.kubectl("wait", "--for=condition=Ready", f"pod/{name}", f"--timeout={limit(60):.0f}s")
    space.kubectl("delete", "pod", name, "--wait=false")
    eventually(lambda: space.get("pod", name) is None, 60, on="pod")
