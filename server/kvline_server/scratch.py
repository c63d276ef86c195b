"""A folder of one run by hand: gone at its end, and if that was a kill, at the next start.

A lock says that a run still lives; the kernel takes it away with the process, however that ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "kvline-run-"
LOCK = "lock"


@contextmanager
def scratch() -> Iterator[Path]:
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        _remove_dead(folder)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    with (folder / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_dead(folder: Path) -> None:
    """One without a lock has only just been made."""
    try:
        about = folder.lstat()
        if folder.is_symlink() or about.st_uid != os.getuid():
            return
        with (folder / LOCK).open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return  # it lives, or somebody else removes it
