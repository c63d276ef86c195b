"""How many CPUs the pod may use, and so how many HTTP processes it has."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from kvline_server.options.clients import ClientLimits

CGROUP = Path("/sys/fs/cgroup")  # in a container, its own
MOST = 4  # HTTP processes; more than one engine process feeds
OTHERS = 2  # CPUs of the engine's step loop, and of its other threads and the parent


def cpus(cgroup: Path = CGROUP) -> int:
    """Those that this process may run on, or fewer by the container's quota; at least 1."""
    allowed = len(os.sched_getaffinity(0))
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with suppress(OSError, ValueError):  # version 2 writes `max` and version 1 -1 for no quota
            quota, period = " ".join((cgroup / name).read_text() for name in files).split()
            if int(quota) > 0:
                allowed = min(allowed, int(quota) // int(period))
    return max(1, allowed)


def http_processes(clients: ClientLimits, allowed: int) -> int:
    """One for each CPU that is left over, but none that may not tokenise a large body: so one on
    the CPU, where the engine needs the cores, and in small containers (docs/decisions/031)."""
    return max(1, min(MOST, allowed - OTHERS, clients.parsing))
