"""`kubectl kvline size` beside a real scheduler and Job controller: what it waits for, what ends
it, and that nothing of it stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from playground import IMAGE, Space, manifest
from waiting import limit

pytestmark = pytest.mark.integration

HUB = {"source": f"hf://org/name@{'0123456789' * 4}"}  # which needs no claim of a volume


class Command:
    """It runs, and what it has printed so far."""

    def __init__(self, space: Space, file: Path) -> None:
        words = ["size", "-f", str(file), "--image", IMAGE, "-n", space.name]
        environment = {
            **os.environ,
            "KUBECONFIG": str(space.cluster.kubeconfig),
            "COLUMNS": "200",
            "PYTHONUNBUFFERED": "1",
        }
        command = [sys.executable, "-m", "kvline_kubectl", *words]
        self.lines: list[str] = []
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        self.reader = Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(self.process.stderr)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(limit(10))
        self.reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def printed(self, *words: str) -> bool:
        return any(all(word in line for word in words) for line in self.lines)


@pytest.fixture
def size(space: Space, tmp_path: Path) -> Iterator[Callable[..., Command]]:
    made: list[Command] = []

    def begin(**spec: Any) -> Command:
        file = tmp_path / "chat.yaml"
        file.write_text(manifest(**spec))
        made.append(Command(space, file))
        return made[-1]

    yield begin
    for each in made:
        each.end()


@pytest.fixture
def node(space: Space) -> Iterator[None]:
    """Without one the scheduler looks for no claim."""
    usual = {"cpu": "8", "memory": "32Gi", "pods": "20", "ephemeral-storage": "100Gi"}
    ready = {"type": "Ready", "status": "True", "reason": "Test", "message": ""}
    status = {"capacity": usual, "allocatable": usual, "conditions": [ready]}
    body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": space.name}, "status": status}
    space.cluster.kubectl("create", "-f", "-", input=json.dumps(body))
    yield
    space.cluster.kubectl("delete", "node", space.name, "--wait=false")


def test_it_waits_for_a_node_and_sigterm_takes_its_job_along(
    space: Space, size: Callable[..., Command], until: Callable[..., Any]
) -> None:
    """As CI systems and `timeout` end a command."""
    command = size(model=HUB)
    until(lambda: command.printed("waits", "Unschedulable"), 60)
    until(lambda: space.list("configmaps"), 30)
    assert command.process.poll() is None
    command.process.send_signal(signal.SIGTERM)
    assert command.process.wait(limit(30)) == 143
    until(lambda: not space.list("jobs"), 60, on="garbage collector")


def test_a_quota_that_refuses_its_pod_is_named(
    space: Space, size: Callable[..., Command], until: Callable[..., Any]
) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "none"},
        "spec": {"hard": {"pods": "0"}},
    }
    space.kubectl("create", "-f", "-", input=json.dumps(quota))
    until(lambda: "used" in (space.get("resourcequota", "none") or {}).get("status", {}), 30)
    command = size(model=HUB)
    until(lambda: command.printed("waits", "exceeded quota: none"), 60)


def test_a_claim_that_is_not_there_ends_it_and_its_job(
    space: Space, node: None, size: Callable[..., Command], until: Callable[..., Any]
) -> None:
    command = size(model={"source": "pvc://nowhere/x"})
    assert command.process.wait(limit(60)) == 1
    until(lambda: command.printed("claim nowhere does not exist in namespace", space.name), 10)
    until(lambda: not space.list("jobs"), 60, on="garbage collector")
