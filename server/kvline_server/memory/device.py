"""Memory accounting of a device: limit, use and peak.

On the CPU the device is the container: the limit from cgroup v1 or v2 (or given), the use as
anonymous, shared and kernel memory without what the kernel can drop, the engine's peak from VmHWM.
Without a container limit the same is counted of the process tree. What other processes have or do
changes neither, but for the kernel's caches in cgroup v1, which tells no parts of it apart.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from kvline_server.errors import ConfigInvalid

MIB = 1 << 20
DROPPED = MIB  # of file pages in a step; fewer do not matter
FILES = 64 * MIB  # code that really runs; with less, first attempts thrashed (decisions/005)
UNLIMITED = 1 << 60  # cgroup v1 writes a huge number, v2 the word max
FREE_PART = 2  # a server without a limit takes 1/FREE_PART of the free memory
CGROUP = Path("/sys/fs/cgroup")
VMSTAT = Path("/proc/vmstat")
M_MMAP_THRESHOLD = -3  # malloc.h
LOADED_BLOCK = 64 << 10
STACK = 16 << 10  # of a thread, in the kernel


class Device(Protocol):
    """All in bytes. `peak` and `now` are for the engine process, `used` for all processes."""

    @property
    def name(self) -> str: ...

    @property
    def driver(self) -> str: ...

    @property
    def gpu(self) -> bool: ...

    @property
    def limit(self) -> int: ...

    @property
    def slack(self) -> int:
        """Margin for what the allocator may need more when the same work is repeated."""

    def used(self) -> int: ...

    def now(self) -> int: ...

    def peak(self) -> int: ...

    def reset_peak(self) -> None: ...

    def keep_peak(self, again: bool) -> bool:
        """Ends a step of a stress. Returns whether its peak is known; if not, and `again` says that
        the step is run once more, the higher figure that it may have been does not count."""

    def working_files(self) -> int:
        """File pages that must stay in memory."""

    def settle(self) -> None:
        """Frees unused memory, so that the next measurement starts clean."""

    def held(self, nbytes: int) -> AbstractContextManager[None]:
        """The canary: allocates and touches `nbytes`. What runs beside it leaves them free.
        Raises DeviceOutOfMemory."""


@dataclass(slots=True)
class StepPeaks:
    """Bytes of anonymous memory, and of file pages as the step began."""

    highest: int = 0  # of the steps since the reset; 0 before the first has ended
    least: int = UNLIMITED  # that this step was seen to take at most, where it is run once more
    files: int = 0


@dataclass(frozen=True, slots=True)
class CpuDevice:
    name: str
    driver: str
    limit: int
    read_used: Callable[[], int]
    slack: int = 24 * MIB  # for other processes' heaps, which grew 6 to 10 MiB at the final size
    bounded: bool = True  # by a container limit or --memory
    gpu: bool = False
    steps: StepPeaks = field(default_factory=StepPeaks)

    def used(self) -> int:
        return self.read_used()

    def now(self) -> int:
        status = _status("self")
        return status["RssAnon"] + status["RssShmem"]

    def peak(self) -> int:
        """Highest anonymous memory since the reset; file pages can be dropped and do not count."""
        return max(self.steps.highest or _peak(_status("self"), self.steps.files), self.now())

    def reset_peak(self) -> None:
        self.steps.highest, self.steps.least = 0, UNLIMITED
        self._begin_step()

    def keep_peak(self, again: bool) -> bool:
        """The kernel knows the peak of all resident memory, of which file pages are taken off. It
        may have dropped some since the peak, which would count as memory of the step. Seen is only
        what the step has lost of them at its end (_peak)."""
        status, steps = _status("self"), self.steps
        known = status["RssFile"] >= steps.files - DROPPED
        steps.least = min(steps.least, _peak(status, steps.files))
        if known or not again:
            steps.highest, steps.least = max(steps.highest, steps.least), UNLIMITED
        self._begin_step()
        return known

    def _begin_step(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM
        self.steps.files = _status("self")["RssFile"]

    def working_files(self) -> int:
        """Code is page cache and could be dropped, but then every step reads it from disk again: a
        container filled to its limit with anonymous memory is not killed, it crawls (seen: a step
        of two seconds was not done after one minute). How much really runs cannot be measured: the
        kernel's marks of referenced pages are set by every process that has the same files."""
        return FILES

    def settle(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)

    @contextmanager
    def held(self, nbytes: int) -> Iterator[None]:
        if not nbytes:
            yield
            return
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            for offset in range(0, nbytes, mmap.PAGESIZE):
                memory[offset] = 1
            yield
        finally:
            memory.close()


def _peak(status: dict[str, int], files: int) -> int:
    """What anonymous memory was at most since VmHWM was cleared, when file pages were so many: they
    may have become more or fewer since. Pages that were dropped before the peak and read again
    after it leave no trace here: the figure is too low by them then."""
    return status["VmHWM"] - min(status["RssFile"], files)


def cpu_device(memory: int | None, root: int, ranks: int = 1) -> CpuDevice:
    """The CPU device: the container's cgroup, or `memory` bytes for the process tree of `root`.

    A `memory` below the container's limit wins. Without either, half of the free memory, because
    other programs run on the machine. Each of several ranks has its share of the limit, and of what
    all processes use.
    """
    limit, used, bounded = _host_memory(memory, root)
    name = f"CPU {platform.machine()}"
    release, share = platform.release(), partial(_share, used, ranks)
    return CpuDevice(name, release, limit // ranks, share, bounded=bounded)


def host_limit(memory: int | None, root: int) -> tuple[int, bool]:
    """Of all ranks, and whether a container or `memory` sets it: what is free changes, and ranks
    must go by the same figure."""
    limit, _, bounded = _host_memory(memory, root)
    return limit, bounded


def check_memory(asked: int, container: int | None, total: int, free: int) -> str | None:
    """For --memory. -> a warning. Raises ConfigInvalid for more than this machine has: a search
    would fill it, and the kernel would end processes, of others too. A container's limit holds
    beside the flag. All in bytes."""
    taken = min(asked, container or asked)
    if taken > total:
        raise ConfigInvalid(
            f"--memory is {asked // MIB} MiB, and this machine has {total // MIB} MiB; give less "
            f"than the {free // MIB} MiB that are free, or leave it out for half of them"
        )
    if container is None and taken > free:
        return (
            f"--memory is {asked // MIB} MiB, and {free // MIB} of this machine's {total // MIB} "
            "MiB are free: for more the kernel may end processes, of others too"
        )
    return None


def machine_memory() -> tuple[int, int]:
    """Bytes that this machine has, and that are free."""
    found = _lines(Path("/proc/meminfo"))
    return found["MemTotal"], found["MemAvailable"]


def unbounded(limit: int) -> str:
    """A warning."""
    mib = limit // MIB
    return f"no container limits memory: sized for {mib} MiB, half of it free; see --memory"


def _share(used: Callable[[], int], ranks: int) -> int:
    return used() // ranks


def _host_memory(memory: int | None, root: int) -> tuple[int, Callable[[], int], bool]:
    tree = partial(tree_used, root)
    limit, used = _cgroup() or (UNLIMITED, tree)
    bounded = limit < UNLIMITED or memory is not None
    if limit >= UNLIMITED:  # no container limit
        limit, used = memory or machine_memory()[1] // FREE_PART + tree(), tree
    return min(limit, memory or limit), used, bounded


@contextmanager
def compact_heap() -> Iterator[None]:
    """While weights are loaded, blocks of LOADED_BLOCK bytes and more are mapped. On the heap they
    and temporary ones leave gaps that differ between two starts: whether the matrices of a step
    fit into them decides what the KV cache gets (docs/decisions/027). Then the threshold is the
    engine's again; in a process without one nothing changes."""
    threshold = os.environ.get("MALLOC_MMAP_THRESHOLD_")
    if threshold is None:
        yield
        return
    library = ctypes.CDLL(None)
    library.mallopt(M_MMAP_THRESHOLD, LOADED_BLOCK)
    try:
        yield
    finally:
        library.mallopt(M_MMAP_THRESHOLD, int(threshold))


def container_limit() -> int | None:
    """Bytes that this process's container may take; None without a limit."""
    limit, _ = _cgroup() or (UNLIMITED, None)
    return limit if limit < UNLIMITED else None


def oom_kills() -> int | None:
    """How many processes of this container the kernel has killed for memory, or of this machine
    where there is no container. None where that cannot be read."""
    v1 = [f / "memory.oom_control" for f in _candidates(CGROUP / "memory", _own_cgroup("memory"))]
    v2 = [f / "memory.events" for f in _candidates(CGROUP, _own_cgroup(""))]
    for file in (*v1, *v2, VMSTAT):
        with suppress(OSError):
            for line in file.read_text().splitlines():
                key, _, count = line.partition(" ")
                if key == "oom_kill":
                    return int(count)
    return None


def counts_own_kills() -> bool:
    """Whether `oom_kills` is of this pod alone: all pods have a limit. Without one the cgroup may
    be a whole session's, or there is none."""
    return container_limit() is not None


def _cgroup() -> tuple[int, Callable[[], int]] | None:
    """Limit and use of the cgroup that holds this process, v1 first (a v1 machine mounts both)."""
    own = _own_cgroup("memory")
    for folder in _candidates(CGROUP / "memory", own):
        if (folder / "memory.limit_in_bytes").is_file():
            limit = int((folder / "memory.limit_in_bytes").read_text())
            return limit, partial(_used_v1, folder)
    for folder in _candidates(CGROUP, _own_cgroup("")):
        if (folder / "memory.max").is_file():
            text = (folder / "memory.max").read_text().strip()
            return (UNLIMITED if text == "max" else int(text)), partial(_used_v2, folder)
    return None


def _own_cgroup(controller: str) -> str:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path.lstrip("/")
    return ""


def _candidates(mount: Path, own: str) -> tuple[Path, ...]:
    # Inside a container the mount is its own cgroup, and the host's path does not exist.
    return (mount / own, mount) if own else (mount,)


def _stat(folder: Path) -> dict[str, int]:
    lines = (folder / "memory.stat").read_text().splitlines()
    return {key: int(value) for key, value in (line.split() for line in lines)}


def _used_v1(folder: Path) -> int:
    stat = _stat(folder)
    kernel = folder / "memory.kmem.usage_in_bytes"
    kernel_bytes = int(kernel.read_text()) if kernel.is_file() else 0
    return stat["total_rss"] + stat["total_shmem"] + kernel_bytes


def _used_v2(folder: Path) -> int:
    """Names and inodes of files are in the kernel's memory too, of which those count that this
    container was the first on its node to read: they are dropped as pages of files are."""
    stat = _stat(folder)
    kernel = stat.get("kernel", stat.get("slab", 0)) - stat.get("slab_reclaimable", 0)
    return stat["anon"] + stat["shmem"] + kernel


def _lines(file: Path) -> dict[str, int]:
    """Numbers by the names before them, those of kB in bytes. Raises OSError for a process that is
    gone."""
    out = {}
    for line in file.read_text().splitlines():
        key, _, rest = line.partition(":")
        number, _, unit = rest.strip().partition(" ")
        if number.isdigit():
            out[key] = int(number) * (1024 if unit == "kB" else 1)
    return out


def _status(pid: int | str) -> dict[str, int]:
    """A process's memory lines in bytes, with PPid and Threads; some have no memory."""
    return _lines(Path(f"/proc/{pid}/status"))


def tree_used(root: int) -> int:
    """Memory of a process and all its descendants, as a container's account has it: anonymous and
    shared memory, each page once, page tables and the kernel's stacks."""
    parents: dict[int, int] = {}
    kernel: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):  # it ended meanwhile
                status = _status(entry)
                parents[int(entry)] = status.get("PPid", 0)
                kernel[int(entry)] = status.get("VmPTE", 0) + STACK * status.get("Threads", 0)
    total = 0
    for pid in parents:
        at = pid
        while at and at != root:
            at = parents.get(at, 0)
        if at == root:
            with suppress(OSError):
                mapped = _lines(Path(f"/proc/{pid}/smaps_rollup"))
                total += mapped.get("Pss_Anon", 0) + mapped.get("Pss_Shmem", 0) + kernel[pid]
    return total
