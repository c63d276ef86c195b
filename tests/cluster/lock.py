"""Locks among all processes of this machine; the kernel takes them from a process that ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Waits for the holder of the file's lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Taken(Exception):
    """`holder`: the process that has the lock."""

    def __init__(self, holder: int) -> None:
        super().__init__(f"taken by process {holder}")
        self.holder = holder


def take(path: Path) -> int:
    """The open file whose lock is this process's until it is closed; raises Taken."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = int(os.read(file, 16) or 0)
        os.close(file)
        raise Taken(holder) from None
    os.truncate(file, 0)
    os.write(file, str(os.getpid()).encode())
    return file
