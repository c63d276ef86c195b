"""What the operator depends on fails: the API server and etcd, the network to the pods, its own
memory."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cgroups
import pytest
from errors import ClusterError
from playground import Node, Operator, Space, serve, worker
from urllib3.exceptions import HTTPError
from waiting import eventually, limit

from kvline_contract.report import State

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

MIB = 1 << 20


@pytest.fixture
def kept(space: Space, tmp_path: Path) -> Iterator[Operator]:
    """An operator that is started again when it ends, as the kubelet does."""
    made = Operator(space, tmp_path / "operator.log").start()
    yield made
    made.stop()


def keep(operator: Operator) -> None:
    assert operator.process is not None
    if operator.process.poll() is not None:
        operator.start()


def is_served(space: Space, kept: Operator, node: Node, replicas: int) -> None:
    """Waits up to 60 s, and restarts an operator that exits."""

    def done() -> bool:
        keep(kept)
        node.play(State.VALIDATED)
        return len(node.pods()) == replicas and space.up_to_date

    eventually(done, 60)


@pytest.mark.fault(
    "F14",
    shows="etcd and the API server killed and away for 5 s: no pod is touched, and what is asked "
    "for afterwards is done within 60 s, the operator started again if it ended",
)
def test_an_api_server_and_its_store_that_were_killed(
    space: Space, kept: Operator, node: Node, cluster: Any
) -> None:
    serve(space, node)
    before = [p["metadata"]["uid"] for p in node.pods()]
    away = ["kube-apiserver", "etcd"]
    cluster.programs.stop(away, signal.SIGKILL)
    time.sleep(5)  # how long the fault lasts
    for name in reversed(away):
        cluster.programs.restart(name)

    def back() -> bool:
        keep(kept)
        try:
            return [p["metadata"]["uid"] for p in node.pods()] == before
        except (ClusterError, HTTPError, OSError):
            return False

    eventually(back, 60)
    eventually(lambda: space.apply(replicas=2, check=False).returncode == 0, 30)

    is_served(space, kept, node, replicas=2)
    assert before[0] in {p["metadata"]["uid"] for p in node.pods()}


@pytest.mark.fault(
    "F39",
    shows="nobody answers at the internal port of a pod that serves, and the operator is started "
    "anew: CapacityMeasured is Unknown with the address, the figures stay, no pod is touched; "
    "Ready stays True",
)
def test_pods_that_the_operator_cannot_reach_serve_on(
    space: Space, operator: Operator, node: Node, until: Callable[..., Any]
) -> None:
    serve(space, node)
    before = [p["metadata"]["uid"] for p in node.pods()]
    node.close()
    operator.stop()
    operator.start()  # the new operator has read no report yet
    until(lambda: space.condition("CapacityMeasured").get("reason") == "ReportMissing")
    measured = space.condition("CapacityMeasured")
    assert measured["status"] == "Unknown" and ":8001" in measured["message"]
    polls = operator.reconciles
    until(lambda: operator.reconciles >= polls + 10)
    pods = node.pods()
    assert [p["metadata"]["uid"] for p in pods] == before
    assert all(c["ready"] for p in pods for c in p["status"]["containerStatuses"])
    service = space.get("kvl", "chat") or {}
    assert service["status"]["capacity"]["kvTokens"] == 4096  # the last figures that were read
    assert space.condition("Ready")["status"] == "True"
    assert "cannot be read" in space.condition("Ready")["message"]


@pytest.mark.fault(
    "F40",
    shows="the operator killed by the kernel in a cgroup of 32 MiB (not 64), while it starts "
    "beside a new service; the one started after it brings the service up",
)
def test_an_operator_that_was_killed_for_memory(
    space: Space, kept: Operator, node: Node, tmp_path: Path
) -> None:
    space.apply()
    eventually(node.pods)
    group = f"kvline-f40-{worker()}"
    cgroups.make(group)
    try:
        confine(group, 32 * MIB)
        kept.stop()
        kept.forks = False
        kept.start()
        assert kept.process is not None
        join(group, kept.process.pid)
        assert kept.process.wait(limit(60)) == -signal.SIGKILL
    finally:
        cgroups.kill_all(group)
        cgroups.remove(group)
    is_served(space, kept, node, replicas=1)


def confine(group: str, size: int) -> None:
    v2 = cgroups.MOUNT / group / "memory.max"
    v1 = cgroups.MOUNT / "memory" / group / "memory.limit_in_bytes"
    (v2 if cgroups.is_v2() else v1).write_text(str(size))


def join(group: str, pid: int) -> None:
    folder = cgroups.MOUNT / group if cgroups.is_v2() else cgroups.MOUNT / "memory" / group
    (folder / "cgroup.procs").write_text(str(pid))
    assert os.path.exists(f"/proc/{pid}")
