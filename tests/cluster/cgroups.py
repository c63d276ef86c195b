"""The cgroup folder under which a cluster's pods live, made before the kubelet starts."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from errors import ClusterError

MOUNT = Path("/sys/fs/cgroup")
ROUNDS = 20
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
        _leave_root()
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


def _leave_root() -> None:
    """cgroup v2 gives no controllers to children of a cgroup with processes, but for the real root:
    in a virtual root, as containers have it, processes move into a child first."""
    if not (MOUNT / "cgroup.type").is_file():
        return  # the real root
    child = MOUNT / "init"
    child.mkdir(exist_ok=True)
    for _ in range(ROUNDS):  # processes start meanwhile
        pids = (MOUNT / "cgroup.procs").read_text().split()
        if not pids:
            return
        for pid in pids:
            with suppress(OSError):  # it has ended
                (child / "cgroup.procs").write_text(pid)
    raise ClusterError(f"{MOUNT} has processes that do not leave it: {', '.join(pids)}")


def _folders(name: str) -> list[Path]:
    if is_v2():
        return [MOUNT / name]
    return [MOUNT / c / name for c in CONTROLLERS_V1 if (MOUNT / c / name).is_dir()]


def kill_all(name: str) -> None:
    """Every process of every pod."""
    for folder in _folders(name)[:4]:
        for group in _groups(folder):
            with suppress(OSError):  # it is gone, or its process
                for pid in (group / "cgroup.procs").read_text().split():
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)


def remove(name: str) -> None:
    for folder in _folders(name):
        for group in reversed(_groups(folder)):
            _rmdir(group)


def _groups(folder: Path) -> list[Path]:
    """A cgroup and those in it, outer ones first. They go while they are listed, at which
    Path.rglob raises."""
    return [Path(at) for at, _, _ in os.walk(folder)]


def _rmdir(path: Path) -> None:
    try:
        path.rmdir()
    except OSError:
        return  # a process is still on its way out; the next start finds and reuses the folder
