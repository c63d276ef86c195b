"""Memory of a device and of this process while a load runs, and lines that say how far it is."""

from __future__ import annotations

import re
import time
from pathlib import Path

import torch

MIB = 1 << 20


class Memory:
    """In MiB. On a CPU the device's is the machine's, and nothing is reserved."""

    def __init__(self) -> None:
        self._gpu = torch.cuda.is_available()
        self._began, self._host = self._reserved(), host_mib()
        self.lowest = float("inf")  # free memory of the device
        self.grew = 0.0  # what torch's allocator has reserved, above the beginning
        self.hosts: list[float] = []  # what this process has of its own, above the beginning

    def read(self) -> None:
        self.lowest = min(self.lowest, self._free())
        self.grew = max(self.grew, self._reserved() - self._began)

    def read_host(self) -> None:
        self.hosts.append(host_mib() - self._host)

    @property
    def host(self) -> float:
        """At most."""
        return max(self.hosts, default=0.0)

    @property
    def host_text(self) -> str:
        """At most in the first half of the reads, and in all: no more is flat."""
        half = max(self.hosts[: -(-len(self.hosts) // 2)], default=0.0)
        return f"{half:.0f}, {self.host:.0f}"

    def _reserved(self) -> float:
        return torch.cuda.memory_reserved() / MIB if self._gpu else 0.0

    def _free(self) -> float:
        if self._gpu:
            return torch.cuda.mem_get_info()[0] / MIB
        found = re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())
        assert found is not None
        return int(found[1]) / 1024


def host_mib() -> float:
    """Anonymous and shared memory of this process."""
    found = re.findall(r"Rss(?:Anon|Shmem):\s+(\d+)", Path("/proc/self/status").read_text())
    return sum(map(int, found)) / 1024


class Pace:
    """Whether a line is due."""

    def __init__(self, every: float = 5.0) -> None:
        self.every, self.began = every, time.monotonic()
        self._last = self.began

    def due(self) -> bool:
        now = time.monotonic()
        if now - self._last < self.every:
            return False
        self._last = now
        return True

    def print(self, text: str) -> None:
        """Where one is due."""
        if self.due():
            print(f"  {time.monotonic() - self.began:6.1f} s  {text}", flush=True)
