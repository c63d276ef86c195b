"""The Job of `kubectl kvline size` and what it owns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from kvline_contract.report import SizingReport
from kvline_kubectl.size import objects
from kvline_operator.api.spec import parse
from kvline_operator.report.display import reported

GOLDEN = Path(__file__).parents[1] / "contract" / "golden"


def made(**resources: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    spec = {
        "model": {"source": "pvc://models/tiny"},
        "resources": {"memory": "2Gi", **resources},
    }
    meta = {"name": "chat", "namespace": "ns", "uid": "u"}
    return objects(parse({"metadata": meta, "spec": spec}), "image")


def test_a_gpu_of_a_device_class_is_claimed_by_a_template_of_the_job_s_own() -> None:
    """That of a revision may not exist, or be deleted meanwhile."""
    job, (config, template) = made(gpus=1, gpuDeviceClass="gpu.nvidia.com")
    name = job["metadata"]["name"]
    (claim,) = job["spec"]["template"]["spec"]["resourceClaims"]
    assert claim["resourceClaimTemplateName"] == template["metadata"]["name"] == name
    (asked,) = template["spec"]["spec"]["devices"]["requests"]
    assert asked["exactly"]["deviceClassName"] == "gpu.nvidia.com"
    assert config["metadata"] == template["metadata"] and config["kind"] == "ConfigMap"


def test_without_a_device_class_the_job_owns_its_launch_file_alone() -> None:
    job, owned = made(gpus=1)
    assert [item["kind"] for item in owned] == ["ConfigMap"]
    assert "resourceClaims" not in job["spec"]["template"]["spec"]


def test_the_memory_of_each_rank_has_its_title() -> None:
    report = SizingReport.parse((GOLDEN / "report-v2-ranks.json").read_bytes())
    assert report.result is not None
    shown = reported(report)
    assert [title for title, _ in shown] == [
        "GPU 0 (rank 0 of 2)",
        "GPU 1 (rank 1 of 2): the least memory left",
    ]
    assert tuple(memory for _, memory in shown) == report.result.ranks
    alone = replace(report, result=replace(report.result, ranks=report.result.ranks[:1]))
    assert reported(alone) == (("", report.result.ranks[0]),)
