"""A node that is too busy for a process: others on its CPU that the kernel prefers."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CPU = max(os.sched_getaffinity(0))
OTHERS, NICE = 4, 5  # that leave it a thirteenth, whatever else this machine runs


@contextmanager
def crowded_out(pid: int) -> Iterator[None]:
    """All its threads share one CPU with busy loops, and get what those leave."""
    loop = ["sh", "-c", "while :; do :; done"]
    others = [subprocess.Popen(loop) for _ in range(OTHERS)]
    threads = [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    kept = {each: (os.sched_getaffinity(each), priority(each)) for each in threads}
    try:
        for other in others:
            os.sched_setaffinity(other.pid, {CPU})
        for each in threads:
            os.sched_setaffinity(each, {CPU})
            os.setpriority(os.PRIO_PROCESS, each, priority(each) + NICE)
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()
        for each, (cpus, nice) in kept.items():
            with suppress(OSError):  # it has ended
                os.sched_setaffinity(each, cpus)
                os.setpriority(os.PRIO_PROCESS, each, nice)


def priority(thread: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread)
