"""The cgroup folder under which a cluster's pods live, made before the kubelet starts."""

from __future__ import annotations

import os
import signal
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
CONTROLLERS_V1 = (
    "cpu",
    "cpuacct",
    "cpuset",
    "memory",
    "pids",
    "blkio",
    "devices",
    "freezer",
    "systemd",
)


def is_v2() -> bool:
    return (MOUNT / "cgroup.controllers").is_file()


def make(name: str) -> None:
    if is_v2():
        controllers = (MOUNT / "cgroup.controllers").read_text().split()
        (MOUNT / "cgroup.subtree_control").write_text(" ".join(f"+{c}" for c in controllers))
        (MOUNT / name).mkdir(exist_ok=True)
        return
    for controller in CONTROLLERS_V1:
        if (MOUNT / controller).is_dir():
            (MOUNT / controller / name).mkdir(exist_ok=True)
    for file in ("cpuset.cpus", "cpuset.mems"):
        inherited = MOUNT / "cpuset" / file
        if inherited.is_file():
            (MOUNT / "cpuset" / name / file).write_text(inherited.read_text())


def _folders(name: str) -> list[Path]:
    if is_v2():
        return [MOUNT / name]
    return [MOUNT / c / name for c in CONTROLLERS_V1 if (MOUNT / c / name).is_dir()]


def kill_all(name: str) -> None:
    """Every process of every pod."""
    for folder in _folders(name)[:4]:
        for procs in folder.rglob("cgroup.procs"):
            for pid in procs.read_text().split():
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    continue


def remove(name: str) -> None:
    for folder in _folders(name):
        for path in sorted(folder.rglob("*"), key=lambda p: len(p.parts), reverse=True):
            if path.is_dir():
                _rmdir(path)
        _rmdir(folder)


def _rmdir(path: Path) -> None:
    try:
        path.rmdir()
    except OSError:
        return  # a process is still on its way out; the next start finds and reuses the folder
