"""GPUs by ResourceClaim: the real API server, controller manager and scheduler accept and allocate
what the operator writes with its own rights. There is no DRA driver: a test publishes a device."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playground import Operator, Space, manifest
from proxy import ACCOUNT, Proxy
from waiting import eventually, limit, settles

from kvline_contract.names import FIELD_MANAGER
from kvline_contract.report import State

pytestmark = pytest.mark.integration

DRIVER = "gpu.example.com"
IMAGE = "localhost/kvline-server@sha256:" + "a" * 64
GPU: dict[str, Any] = {"memory": "2Gi", "gpus": 1}


def claimed(device_class: str) -> dict[str, Any]:
    """A spec; its model needs no claim of a volume, without which no pod is scheduled."""
    resources = {**GPU, "gpuDeviceClass": device_class}
    model = {"source": "hf://org/name@" + "0123456789" * 4}
    return {"image": IMAGE, "model": model, "resources": resources}


def templates(space: Space) -> dict[str, str]:
    """Name -> device class."""
    return {
        item["metadata"]["name"]: request["exactly"]["deviceClassName"]
        for item in space.list("resourceclaimtemplates")
        for request in item["spec"]["spec"]["devices"]["requests"]
    }


def claims(space: Space) -> list[dict[str, Any]]:
    return space.list("resourceclaims")


@pytest.fixture
def device_class(space: Space) -> Iterator[str]:
    """A node with one device of a driver, and the class of its devices."""
    name = space.name
    usual = {"cpu": "8", "memory": "32Gi", "pods": "20", "ephemeral-storage": "100Gi"}
    ready = {"type": "Ready", "status": "True", "reason": "Test", "message": ""}
    chosen = {"cel": {"expression": f"device.driver == '{DRIVER}'"}}
    pool = {"name": name, "generation": 1, "resourceSliceCount": 1}
    made: list[tuple[str, str, dict[str, Any]]] = [
        (
            "v1",
            "Node",
            {"status": {"capacity": usual, "allocatable": usual, "conditions": [ready]}},
        ),
        ("resource.k8s.io/v1", "DeviceClass", {"spec": {"selectors": [chosen]}}),
        (
            "resource.k8s.io/v1",
            "ResourceSlice",
            {
                "spec": {
                    "driver": DRIVER,
                    "nodeName": name,
                    "pool": pool,
                    "devices": [{"name": "gpu-0"}],
                }
            },
        ),
    ]
    for version, kind, rest in made:
        body = {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **rest}
        space.cluster.kubectl("create", "-f", "-", input=json.dumps(body))
    yield name
    for _, kind, _ in made:
        space.cluster.kubectl("delete", kind.lower(), name, "--wait=false")


def test_the_scheduler_gives_a_replica_a_device_and_says_when_there_is_none(
    space: Space, operator: Operator, device_class: str, until: Callable[..., Any]
) -> None:
    space.apply(replicas=2, **claimed(device_class))
    bound = until(lambda: [p for p in space.list("pods") if p["spec"].get("nodeName")], 60)
    assert [pod["spec"]["nodeName"] for pod in bound] == [device_class]
    (pod,) = bound
    (server,) = pod["spec"]["containers"]
    assert server["resources"]["claims"] == [{"name": "gpu"}]
    assert not any("/" in key for key in server["resources"]["limits"])
    (given,) = pod["status"]["resourceClaimStatuses"]
    claim = space.get("resourceclaims", given["resourceClaimName"])
    assert claim is not None
    (device,) = claim["status"]["allocation"]["devices"]["results"]
    assert (device["request"], device["driver"], device["device"]) == ("gpu", DRIVER, "gpu-0")

    (template,) = space.list("resourceclaimtemplates")
    (deployment,) = space.list("deployments")
    assert template["metadata"]["name"] == deployment["metadata"]["name"]
    (owner,) = template["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["controller"]) == ("InferenceService", "chat", True)
    managers = {m["manager"]: m["operation"] for m in template["metadata"]["managedFields"]}
    assert managers == {FIELD_MANAGER: "Apply"}

    space.kubectl("patch", "kvl", "chat", "--type=merge", "-p", '{"spec":{"replicas":3}}')
    until(lambda: space.condition("Progressing").get("reason") == "Unschedulable", 60)
    assert "claim" in space.condition("Progressing")["message"]


def test_a_size_is_measured_with_a_device_of_its_own(
    space: Space, device_class: str, tmp_path: Path, until: Callable[..., Any]
) -> None:
    """`kubectl kvline size`; when it is interrupted, claim and template go with the Job."""
    file = tmp_path / "chat.yaml"
    file.write_text(manifest(**claimed(device_class)))
    words = ["size", "-f", str(file), "--image", IMAGE, "-n", space.name]
    environment = {**os.environ, "KUBECONFIG": str(space.cluster.kubeconfig)}
    process = subprocess.Popen([sys.executable, "-m", "kvline_kubectl", *words], env=environment)
    try:
        (pod,) = until(lambda: [p for p in space.list("pods") if p["spec"].get("nodeName")], 60)
        (claim,) = claims(space)
        (device,) = claim["status"]["allocation"]["devices"]["results"]
        assert device["device"] == "gpu-0"
        assert [r["name"] for r in claim["status"]["reservedFor"]] == [pod["metadata"]["name"]]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(limit(30))
    until(lambda: not space.list("jobs") and not templates(space), 60, on="garbage collector")


def test_a_revision_has_its_template_and_takes_it_along(
    space: Space, operator: Operator, node: Any, until: Callable[..., Any]
) -> None:
    """Pruned with its revision, written only once, and collected with the service."""

    def served_by(device_class: str) -> bool:
        node.play(State.VALIDATED)
        return space.up_to_date and set(templates(space).values()) == {device_class}

    space.apply(**claimed("gpu.nvidia.com"))
    until(lambda: served_by("gpu.nvidia.com"), 60)
    (first,) = templates(space)
    space.apply(**claimed("mig.nvidia.com"))
    until(lambda: set(templates(space).values()) == {"gpu.nvidia.com", "mig.nvidia.com"})
    until(lambda: served_by("mig.nvidia.com"), 60)
    (second,) = templates(space)
    assert second != first

    before = space.get("resourceclaimtemplates", second)
    # Twice, because what the old revision's last pods were is counted only when they have gone.
    settles(lambda: operator.writes_nothing() and operator.writes_nothing(), seconds=60)
    assert space.get("resourceclaimtemplates", second) == before

    space.apply(image=IMAGE, resources=GPU, model=claimed("x")["model"])  # by extended resource
    until(lambda: node.play(State.VALIDATED) or not templates(space), 60)
    assert space.list("deployments")[0]["spec"]["template"]["spec"].get("resourceClaims") is None
    space.apply(**claimed("gpu.nvidia.com"))
    until(lambda: templates(space))
    space.kubectl("delete", "kvl", "chat")
    # In a new cluster Kubernetes' garbage collector finds our kind within 30 s of its definition.
    until(lambda: not templates(space) and not claims(space), 90, on="garbage collector")


def test_a_deleted_template_is_there_again_for_the_next_pod(
    space: Space, operator: Operator, until: Callable[..., Any]
) -> None:
    """F03: it is not watched; a pod that waits for it wakes the service."""
    space.apply(**claimed("gpu.nvidia.com"))
    (first,) = until(lambda: claims(space))
    space.kubectl("delete", "resourceclaimtemplates", "--all")
    space.kubectl("delete", "pods", "--all")
    until(lambda: templates(space))
    uid = first["metadata"]["uid"]
    until(lambda: [c for c in claims(space) if c["metadata"]["uid"] != uid], 60)


def test_a_foreign_template_is_left_alone(
    space: Space, operator: Operator, until: Callable[..., Any]
) -> None:
    """F24."""
    space.apply(**claimed("gpu.nvidia.com"))
    (name,) = until(lambda: templates(space))
    operator.stop()
    space.kubectl("delete", "resourceclaimtemplates", "--all")
    request = {"name": "theirs", "exactly": {"deviceClassName": "theirs"}}
    foreign = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name},
        "spec": {"spec": {"devices": {"requests": [request]}}},
    }
    space.kubectl("create", "-f", "-", input=json.dumps(foreign))
    operator.start()
    until(lambda: space.condition("Accepted").get("reason") == "NameConflict")
    assert f"ResourceClaimTemplate {name} exists" in space.condition("Accepted")["message"]
    assert templates(space) == {name: "theirs"}


@pytest.fixture
def older(space: Space, tmp_path: Path) -> Iterator[Proxy]:
    """An API server without resource.k8s.io, as those before 1.34 are."""
    made = Proxy(space.cluster.kubeconfig.parent / ACCOUNT, tmp_path)
    made.answer = lambda method, path: (404, {}) if "resource.k8s.io" in path else None
    yield made
    made.shutdown()
    made.server_close()


def test_without_the_api_the_field_has_a_condition_and_other_services_notice_nothing(
    space: Space, older: Proxy, node: Any, tmp_path: Path, until: Callable[..., Any]
) -> None:
    """The operator starts, watches, resyncs and serves there, and writes no pods with a field that
    an older API server would drop: they would run without a GPU."""
    operator = Operator(space, tmp_path / "operator.log", kubeconfig=older.kubeconfig)
    operator.resync = 2
    operator.start()
    try:
        space.apply()
        until(lambda: node.play(State.VALIDATED) or space.up_to_date, 60)
        older.await_resync()
        asked = [path for path in (*older.reads, *older.writes) if "resource.k8s.io" in path]
        assert asked == []
        space.apply("gpu", **claimed("gpu.nvidia.com"))
        until(lambda: space.condition("Accepted", "gpu").get("reason") == "SpecInvalid")
        message = space.condition("Accepted", "gpu")["message"]
        assert message.startswith("spec.resources.gpuDeviceClass needs the API resource.k8s.io/v1")
        assert "Kubernetes 1.34 or newer" in message and "spec.resources.gpuResource" in message
        assert len(space.list("deployments")) == 1

        space.apply("gpu", image=IMAGE, resources=GPU)
        until(lambda: space.condition("Accepted", "gpu").get("status") == "True")
        eventually(lambda: len(space.list("deployments")) == 2)
        assert space.up_to_date
    finally:
        operator.stop()
    text = operator.log.read_text()
    assert "Traceback" not in text, text[-3000:]
