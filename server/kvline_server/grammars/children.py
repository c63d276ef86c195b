"""Processes that are forked from one that has loaded what they share: it has one thread."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import traceback
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def forked(work: Callable[[], object], keep: tuple[int, ...]) -> int:
    """A process that does the work and ends, at the latest when this one does. Of the open files
    it has the streams and `keep`. -> its process id. Raises OSError."""
    parent = os.getpid()
    if pid := os.fork():
        return pid
    code = 1
    try:
        gc.disable()  # pages that the collector does not write to stay shared
        end_with(parent)
        _close_all_but(keep)
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def end_with(parent: int) -> None:
    """Whatever ends the parent ends this process, its child."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


def _close_all_but(keep: tuple[int, ...]) -> None:
    begin = 3
    for file in (*sorted(keep), 1 << 16):
        os.closerange(begin, file)
        begin = file + 1
