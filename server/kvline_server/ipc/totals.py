"""What the requests of all HTTP processes hold together: a bound is one for the pod.

Counters in memory that the processes share, under a lock of the kernel, which is free again when a
process dies. What that one held stays counted, because the parent then ends the pod.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

SEQUENCES, TOKENS, SCORE_BYTES, BODY_BYTES, DECODE_BYTES = KINDS = range(5)
SIZE = 8 * len(KINDS)


def create() -> int:
    """A file descriptor of new counters, for `Totals` in each process."""
    file = os.memfd_create("kvline-totals")
    os.ftruncate(file, SIZE)
    return file


class Totals:
    """Only for a process's event loop: the lock excludes processes, not threads."""

    def __init__(self, file: int | None = None) -> None:
        """Without a file they are of this process alone."""
        self._file = create() if file is None else file
        self._held = memoryview(mmap.mmap(self._file, SIZE)).cast("q")

    def __getitem__(self, kind: int) -> int:
        return self._held[kind]

    def take(self, *wanted: tuple[int, int, int]) -> bool:
        """Adds an amount of each kind, up to a limit: (kind, amount, limit). All of them or, where
        one does not fit, none."""
        with self._locked():
            if any(self._held[kind] + amount > limit for kind, amount, limit in wanted):
                return False
            for kind, amount, _ in wanted:
                self._held[kind] += amount
            return True

    def give(self, *held: tuple[int, int]) -> None:
        """Takes amounts off again: (kind, amount)."""
        with self._locked():
            for kind, amount in held:
                self._held[kind] -= amount

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
