"""A temporary folder for one run of the command line, removed at its end.

After a kill the next run removes it: a run holds a lock, which the kernel releases at its end.
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
    """Removes the folder of a run that has ended; one without a lock file is being created."""
    try:
        about = folder.lstat()
        if folder.is_symlink() or about.st_uid != os.getuid():
            return
        with (folder / LOCK).open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return  # its run is alive, or another process removes it
