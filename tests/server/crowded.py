"""A node that is too busy for a process: others on its CPU that the kernel prefers."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CPU = max(os.sched_getaffinity(0))
OTHERS = 2  # each of which gets five times as much of it


def _threads(pid: int) -> list[int]:
    return [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]


@contextmanager
def crowded_out(pid: int) -> Iterator[None]:
    """All its threads share one CPU with busy loops, and get what those leave."""
    loop = ["sh", "-c", "while :; do :; done"]
    others = [subprocess.Popen(loop) for _ in range(OTHERS)]
    kept = {thread: os.sched_getaffinity(thread) for thread in _threads(pid)}
    try:
        for other in others:
            os.sched_setaffinity(other.pid, {CPU})
            os.setpriority(os.PRIO_PROCESS, other.pid, 19)
        for thread in kept:
            os.sched_setaffinity(thread, {CPU})
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()
        for thread, cpus in kept.items():
            with suppress(OSError):  # it has ended
                os.sched_setaffinity(thread, cpus)
                os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
