"""The processes of a pod, as the machine that it runs on shows them."""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from errors import ClusterError
from programs import processes

ENGINE, SUPERVISOR = "kvline_server.engine_process", "kvline_server serve"
RANK = "kvline_server.engine_process.rank"  # each but rank 0, which is the engine


def find(pod_uid: str, words: str) -> int:
    """The process of a pod whose command line has these words."""
    for pid, command in processes():
        with suppress(OSError):  # it has ended meanwhile
            if f"{words} " in f"{command} " and pod_uid in Path(f"/proc/{pid}/cgroup").read_text():
                return pid
    raise ClusterError(f"no process of pod {pod_uid} runs {words}")


def gpu_of(pid: int) -> str:
    """The UUID of the GPU that a process uses. Raises ClusterError."""
    query = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        user, _, gpu = line.partition(",")
        if user.strip() == str(pid):
            return gpu.strip()
    found = (done.stdout + done.stderr).strip()
    raise ClusterError(f"nvidia-smi does not list process {pid}, but: {found or 'nothing'}")


def age(pid: int) -> float:
    """Seconds since a process was started."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc_pid_stat(5)
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started
