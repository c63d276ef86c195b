"""Resized pixels of images, in memory that an HTTP process shares with the engine, each of its
ranks: one image is larger than a frame may be.

The HTTP process alone says which place is whose, and frees one when the engine reads it no longer
(messages.Released). The kernel has memory only for pages that were written once.
"""

from __future__ import annotations

import mmap
import os
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvline_server.errors import InvalidFrame

if TYPE_CHECKING:  # the parent, which creates the memory, imports no numpy
    import numpy as np
    from numpy.typing import NDArray

PAGE = mmap.PAGESIZE
COLOURS = 3  # bytes of a pixel


def create(nbytes: int) -> int:
    """A file descriptor of so much memory, for one HTTP process and the engine's."""
    file = os.memfd_create("kvline-pixels")
    os.ftruncate(file, nbytes)
    return file


def place_bytes(height: int, width: int) -> int:
    """That the place of an image of so many pixels has: whole pages."""
    return -(-height * width * COLOURS // PAGE) * PAGE


class Places:
    """The HTTP process's: which parts are taken, and what is written to them. Only for its event
    loop, but for `write`."""

    def __init__(self, file: int) -> None:
        self.total = os.fstat(file).st_size // PAGE * PAGE  # bytes
        self._map = mmap.mmap(file, self.total)
        self._taken: dict[int, int] = {}  # bytes by offset
        self._free = [(0, self.total)]  # offset and bytes, in their order, never two beside another

    @property
    def used(self) -> int:
        """Bytes."""
        return sum(self._taken.values())

    @property
    def free(self) -> int:
        """Bytes; a place needs as many in one piece."""
        return sum(size for _, size in self._free)

    def allocate(self, nbytes: int) -> int | None:
        """The offset of the first free place of so many bytes, by the page; None: there is none."""
        wanted = max(PAGE, -(-nbytes // PAGE) * PAGE)
        for at, (offset, size) in enumerate(self._free):
            if size >= wanted:
                rest = [(offset + wanted, size - wanted)] if size > wanted else []
                self._free[at : at + 1] = rest
                self._taken[offset] = wanted
                return offset
        return None

    def allocate_all(
        self, sizes: Sequence[int], spare: Iterable[int]
    ) -> tuple[list[int], list[int]] | None:
        """The offsets of places of so many bytes, and those of `spare` that were released for them:
        the first ones, as few as need be. None, and nothing changed: there is no room for all."""
        before = dict(self._taken), list(self._free)
        left, offsets, released = iter(spare), list[int](), list[int]()
        for nbytes in sizes:
            while (offset := self.allocate(nbytes)) is None:
                if (next_spare := next(left, None)) is None:
                    self._taken, self._free = before
                    return None
                self.release(next_spare)
                released.append(next_spare)
            offsets.append(offset)
        return offsets, released

    def release(self, offset: int) -> None:
        """Raises InvalidFrame where no place begins there."""
        size = self._taken.pop(offset, None)
        if size is None:
            raise InvalidFrame(f"a place for pixels at {offset} that nobody holds")
        at = bisect_left(self._free, (offset, 0))
        start, end = offset, offset + size
        if at < len(self._free) and self._free[at][0] == end:
            end += self._free.pop(at)[1]
        if at and sum(self._free[at - 1]) == start:
            at -= 1
            start = self._free.pop(at)[0]
        self._free.insert(at, (start, end - start))

    def write(self, offset: int, values: NDArray[np.uint8]) -> None:
        """`values` [height, width, 3], contiguous, to a place; any thread may, while it is held.
        Raises InvalidFrame where they are larger than it."""
        if values.nbytes > self._taken.get(offset, 0):
            raise InvalidFrame(f"{values.nbytes} bytes of pixels for a smaller place at {offset}")
        self._map[offset : offset + values.nbytes] = values.data


@dataclass(frozen=True, slots=True)
class Place:
    """Of an image's pixels."""

    process: int  # whose memory it is, by its index
    offset: int  # bytes


class SharedPixels:
    """The engine's side, of any rank: it reads."""

    def __init__(self, file: int, process: int = 0) -> None:
        """`process`: the index of the HTTP process."""
        self.process = process
        self.total = os.fstat(file).st_size
        self._map = mmap.mmap(file, self.total, prot=mmap.PROT_READ)

    def view(self, offset: int, height: int, width: int) -> NDArray[np.uint8]:
        """[height, width, 3], read-only and not copied. Raises InvalidFrame where a place would not
        be within the memory."""
        import numpy as np

        count = height * width * COLOURS
        if min(height, width) < 1 or offset % PAGE or not 0 <= offset <= self.total - count:
            raise InvalidFrame(
                f"pixels of {height} x {width} at {offset}, outside of the {self.total} bytes that "
                "are shared"
            )
        pixels = np.frombuffer(self._map, np.uint8, count, offset)
        return pixels.reshape(height, width, COLOURS)


def shared_pixels(files: Sequence[int]) -> list[SharedPixels]:
    """Of each HTTP process, in their order."""
    return [SharedPixels(file, process) for process, file in enumerate(files)]
