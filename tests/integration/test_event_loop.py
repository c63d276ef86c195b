"""What the operator's event loop must never do: wait, or compute for long."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from playground import Node, Operator, Space, manifest, serve
from servers import FAULTS
from waiting import eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

SERVICES = 30
BLOCKED = """
import asyncio, socket, time

async def main():
    time.sleep(0.01)
    socket.getaddrinfo("localhost", 80)
    end = time.thread_time() + 0.5
    while time.thread_time() < end:
        pass
    await asyncio.to_thread(time.sleep, 0.01)

asyncio.run(main())
"""


def has_more_pods(node: Node, number: int) -> bool:
    return len(node.pods()) > number


@pytest.mark.fault(
    "F21",
    shows="in asyncio's debug mode, through 30 services made, changed and deleted: no call that "
    "waits, and no callback of more than 300 ms of CPU time (not 100 ms of wall time)",
)
def test_nothing_blocks_the_operator_s_event_loop(space: Space, node: Node, tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    operator = Operator(space, tmp_path / "operator.log")
    operator.extra = {"PYTHONASYNCIODEBUG": "1", "KVLINE_WATCH_LOOP": str(blocked)}
    operator.start()
    try:
        space.apply()
        eventually(node.pods, 90)
        serve(space, node)
        names = [f"many-{n}" for n in range(SERVICES)]
        for replicas in (1, 2):
            many = "\n---\n".join(manifest(name, replicas=replicas) for name in names)
            space.kubectl("apply", "-f", "-", input=many)
            wanted = replicas * SERVICES
            eventually(partial(has_more_pods, node, wanted), 90)
        space.kubectl("delete", "kvl", "--all")
        eventually(lambda: not space.list("deployments"), 90, on="garbage collector")
    finally:
        operator.stop()
    assert "Traceback" not in operator.log.read_text()
    assert blocked.read_text() == ""


def test_what_blocks_a_loop_is_noticed(tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    found = {"PYTHONPATH": str(FAULTS), "KVLINE_WATCH_LOOP": str(blocked)}
    subprocess.run([sys.executable, "-c", BLOCKED], env={**os.environ, **found}, check=True)
    lines = blocked.read_text().splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["time.sleep", "socket.getaddrinfo"]
    assert len(lines) == 3 and "s of CPU time" in lines[2]
