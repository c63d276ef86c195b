"""Bytes that this process takes."""

from __future__ import annotations

import ctypes
import resource
from pathlib import Path


class _Counts(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


_libc = ctypes.CDLL(None)
_mallinfo2 = _libc.mallinfo2
_mallinfo2.restype = _Counts
# That llguidance asks for while it compiles any grammar, and hardly touches: it is no memory, but
# the kernel bounds it.
_UNTOUCHED = 16 << 20


def used() -> int:
    """Bytes of the heap that are in use. Where many small ones are free, it takes tens of ms."""
    counts = _mallinfo2()
    return int(counts.uordblks) + int(counts.hblkhd)


def data() -> int:
    """Bytes that RLIMIT_DATA bounds: also those of the heap that are free."""
    pages = Path("/proc/self/statm").read_text("ascii").split()[5]
    return int(pages) * resource.getpagesize()


def limit(growth: int) -> None:
    """Ends this process where it takes so many bytes beside those that it takes now."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data() + growth + _UNTOUCHED, hard))


class Growth:
    """Bytes of the heap that this process uses beside those of its beginning."""

    def __init__(self) -> None:
        self._before = used()
        self._counted, self._data = 0, data()  # at the last count

    def exceeds(self, most: int) -> bool:
        """Counts only where what was taken from the kernel since the last count may be too much."""
        if self._counted + max(0, data() - self._data) <= most:
            return False
        self._counted, self._data = used() - self._before, data()
        return self._counted > most
