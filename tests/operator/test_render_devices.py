"""Rendered GPUs: by resource, as ranks on the CPU, and claimed from a device class."""

from __future__ import annotations

from typing import Any

import pytest
from test_render import OWNER, spec

from kvline_contract.launch import VERSION, GateFile, LaunchConfig
from kvline_operator.api.spec import ServiceSpec
from kvline_operator.plan.acceptance import comparison_group
from kvline_operator.plan.render import controller_revision, launch_config, revision_objects
from kvline_operator.plan.revisions import Revision, known, wanted
from kvline_operator.settings import Settings


@pytest.mark.parametrize("gpus", [1, 2, 3, 8])
def test_gpus_become_ranks_of_one_pod(gpus: int) -> None:
    made = spec(resources={"memory": "16Gi", "gpus": gpus})
    settings = Settings("cpu-image", default_cuda_image="cuda-image", runtime_class="nvidia")
    stored = controller_revision(made, Revision("aaaaa", "i", made.inputs_json, 1), settings)
    pod = stored["data"]["podTemplate"]["spec"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == str(gpus)
    (shm,) = (v["emptyDir"] for v in pod["volumes"] if v["name"] == "shm")
    assert shm == {"medium": "Memory", "sizeLimit": "1Gi" if gpus > 1 else "64Mi"}
    launch = LaunchConfig.parse(stored["data"]["launch"])
    assert (launch.device, launch.tensor_parallel) == ("cuda", gpus)
    assert settings.image_for(made.gpus) == "cuda-image"


@pytest.mark.parametrize("gpus", [1, 2, 3])
def test_cpu_ranks_ask_the_node_for_nothing(gpus: int) -> None:
    """A replica of several ranks where there are no GPUs, such as a test's cluster."""
    asked = {"memory": "2Gi", "gpus": gpus, "gpuResource": "kvline.dev/cpu-rank"}
    made = spec(resources=asked)
    settings = Settings("cpu-image", default_cuda_image="cuda-image", runtime_class="nvidia")
    stored = controller_revision(made, Revision("aaaaa", "i", made.inputs_json, 1), settings)
    pod = stored["data"]["podTemplate"]["spec"]
    assert pod["containers"][0]["resources"] == {
        "requests": {"memory": "2Gi"},
        "limits": {"memory": "2Gi"},
    }
    (shm,) = (v["emptyDir"] for v in pod["volumes"] if v["name"] == "shm")
    assert shm["sizeLimit"] == ("1Gi" if gpus > 1 else "64Mi")
    assert "runtimeClassName" not in pod
    launch = LaunchConfig.parse(stored["data"]["launch"])
    assert (launch.device, launch.tensor_parallel) == ("cpu", gpus)
    assert settings.image_for(made.gpus) == "cpu-image"


BY_NAME = {"memory": "16Gi", "gpus": 1}
CLAIMED = {**BY_NAME, "gpuDeviceClass": "gpu.nvidia.com"}


def objects(made: ServiceSpec, stored: dict[str, Any]) -> dict[str, Any]:
    """Of a revision, by kind."""
    return {o["kind"]: o for o in revision_objects(made, stored, 1, GateFile(VERSION, True), "{}")}


def test_a_gpu_of_a_device_class_is_claimed_and_no_extended_resource() -> None:
    made = spec(resources=CLAIMED)
    revision = Revision("aaaaa", "i", made.inputs_json, 1)
    stored = controller_revision(made, revision, Settings("image", runtime_class="nvidia"))
    rendered = objects(made, stored)
    template, deployment = rendered["ResourceClaimTemplate"], rendered["Deployment"]
    assert template["apiVersion"] == "resource.k8s.io/v1"
    assert template["metadata"] == deployment["metadata"]  # name, labels and owner
    exactly = {"deviceClassName": "gpu.nvidia.com", "count": 1}
    assert template["spec"] == {
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}
    }
    pod = deployment["spec"]["template"]["spec"]
    assert pod["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": "chat-aaaaa"}]
    assert pod["containers"][0]["resources"] == {
        "requests": {"memory": "16Gi"},
        "limits": {"memory": "16Gi"},
        "claims": [{"name": "gpu"}],
    }
    assert pod["runtimeClassName"] == "nvidia"
    launch = launch_config(OWNER, "aaaaa", stored["data"])
    assert (launch.device, launch.tensor_parallel) == ("cuda", 1)


@pytest.mark.parametrize("resources", [BY_NAME, {**CLAIMED, "gpus": 0}])
def test_without_a_device_class_or_a_gpu_nothing_is_claimed(resources: dict[str, Any]) -> None:
    made = spec(resources=resources)
    stored = controller_revision(
        made, Revision("aaaaa", "i", made.inputs_json, 1), Settings("image")
    )
    rendered = objects(made, stored)
    pod = rendered["Deployment"]["spec"]["template"]["spec"]
    assert "ResourceClaimTemplate" not in rendered and "resourceClaims" not in pod
    assert "claims" not in pod["containers"][0]["resources"]


def test_another_device_class_is_another_revision_and_the_earlier_one_keeps_its_own() -> None:
    """A ResourceClaimTemplate's spec is immutable, so that of a stored revision is never rendered
    anew."""
    first, second = spec(resources=CLAIMED), spec(resources={**CLAIMED, "gpuDeviceClass": "mig"})
    revision = wanted(first, [], "image")
    stored = controller_revision(first, revision, Settings("image"))
    assert wanted(second, known([stored]), "image").name != revision.name
    assert wanted(first, known([stored]), "image").name == revision.name
    assert comparison_group(second.inputs) == comparison_group(spec(resources=BY_NAME).inputs)
    kept = objects(second, stored)["ResourceClaimTemplate"]
    assert kept == objects(first, stored)["ResourceClaimTemplate"]
