"""The encoder's cache: which of its rows have which image, by the digest of the image's pixels.

Bookkeeping on row numbers alone. An image has its rows while a step may need them, and keeps them
until others do: `hold` is asked anew before each step, so that nothing is counted from step to step
and the oldest sequence always gets what it needs. Invariant after every call: the rows of all
images and the free ones are all rows, each once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class _Entry:
    rows: NDArray[np.int64]
    ready: bool = False  # the encoder has written them


class EncodedRows:
    def __init__(self, total: int) -> None:
        self.total = total
        self._free = np.arange(total, dtype=np.int64)
        self._images: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently held first

    @property
    def free(self) -> int:
        return len(self._free)

    def hold(self, wanted: Iterable[tuple[bytes, int]]) -> list[bytes]:
        """Gives images, as (digest, rows), their rows: those of the first ones, up to one that does
        not fit beside these. Of the others the least recently held lose theirs where there is need.
        -> the images that have"""
        held, left = dict[bytes, int](), self.total
        for digest, count in wanted:
            left -= 0 if digest in held else count
            if left < 0:
                break
            held[digest] = count
        missing = sum(count for digest, count in held.items() if digest not in self._images)
        for digest in [each for each in self._images if each not in held]:
            if len(self._free) >= missing:
                break
            self.drop(digest)
        for digest, count in held.items():
            if digest not in self._images:
                rows, self._free = self._free[:count], self._free[count:]
                self._images[digest] = _Entry(rows)
            self._images.move_to_end(digest)
        return list(held)

    def rows(self, digest: bytes) -> NDArray[np.int64] | None:
        """Where an image's rows are or will be; None where it has none."""
        entry = self._images.get(digest)
        return None if entry is None else entry.rows

    def ready(self, digest: bytes) -> bool:
        entry = self._images.get(digest)
        return entry is not None and entry.ready

    def written(self, digest: bytes) -> None:
        self._images[digest].ready = True

    def drop(self, digest: bytes) -> None:
        """Frees the rows of an image, if it has any."""
        if (entry := self._images.pop(digest, None)) is not None:
            self._free = np.concatenate((self._free, entry.rows))
