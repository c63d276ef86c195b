"""The path of a GPU pod without a GPU: containerd 2, the plain device plug-in, and /dev/null for a
device. The kubelet, the scheduler and the operator are the real ones; the engine finds no driver.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support import pods, up, wait
from test_main_job import RANDOM
from waiting import eventually, limit

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NEEDS_GPU = {**RANDOM, "resources": {"cpu": "100m", "memory": "2Gi", "gpus": 1}}


@pytest.fixture(scope="module")
def node(space: Any) -> Iterator[Any]:
    """A namespace of a GPU node's cluster, which runs beside that of the other tests."""
    import build
    from node import GpuNode

    cluster = GpuNode("e2e-gpu")
    # The CPU's image: a GPU's is built on request, and needs no GPU to find no driver.
    yield up(cluster, "team", **{"image.cuda": build.image_name("server")})
    cluster.down()


@pytest.fixture
def gpu(node: Any) -> Any:
    node.cluster.start_plugin(plain=["/dev/null"], mount="")
    return node


def test_a_gpu_pod_without_a_driver_is_held_and_explained(gpu: Any) -> None:
    assert gpu.cluster.allocatable() == "1"
    gpu.apply("first", **NEEDS_GPU)
    progressing = wait(gpu, "first", "Progressing", reason="DeviceFailure")
    assert "libcuda.so.1" in progressing["message"]
    gpu.apply("second", **NEEDS_GPU)
    waiting = wait(gpu, "second", "Progressing", reason="Unschedulable")
    assert "Insufficient nvidia.com/gpu" in waiting["message"]
    (first,) = [p for p in pods(gpu) if p["metadata"]["name"].startswith("first")]
    restarts = first["status"]["containerStatuses"][0]["restartCount"]
    eventually(lambda: _restarts(gpu, "first") > restarts, 120, on="pod")
    rollout = gpu.get("kvl", "first")["status"]["rollout"]
    assert rollout.get("gate", {}).get("result") != "Rejected"  # no fault of its revision

    gpu.kubectl("delete", "kvl", "first", f"--timeout={limit(60):.0f}s")
    wait(gpu, "second", "Progressing", reason="DeviceFailure")  # it has the GPU now
    gpu.kubectl("delete", "kvl", "second", f"--timeout={limit(60):.0f}s")


def _restarts(space: Any, name: str) -> int:
    found = [p for p in pods(space) if p["metadata"]["name"].startswith(name)]
    return sum(p["status"]["containerStatuses"][0]["restartCount"] for p in found)
