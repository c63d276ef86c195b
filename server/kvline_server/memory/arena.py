"""The KV cache's memory: an address range reserved once, with pages mapped up to the budget.

Resizing keeps addresses, so pointers into the arena stay valid. On the CPU the reservation is an
anonymous mapping whose pages are touched at once, so that the kernel charges them now and not while
a request runs.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from typing import Protocol

import torch

from kvline_server.errors import DeviceOutOfMemory
from kvline_server.memory.pages import PAGE_SIZE

_MAP_NORESERVE = 0x4000  # Linux; reserves addresses without committing memory


@dataclass(frozen=True, slots=True)
class Scales:
    """What the stored keys and values of a layer are multiplied by to give the model's own."""

    keys: float = 1.0
    values: float = 1.0


UNSCALED = Scales()


@dataclass(frozen=True, slots=True)
class KVLayer:
    """One layer's KV cache: a view of the arena."""

    keys: torch.Tensor  # [pages, page, kv_heads, dim]
    values: torch.Tensor  # [pages, page, kv_heads, dim]
    scales: Scales = UNSCALED  # others only of an fp8 cache


@dataclass(frozen=True, slots=True)
class KVShape:
    """What each layer keeps of a token."""

    layers: int
    heads: int  # of keys, and as many of values
    dim: int
    dtype: torch.dtype
    scales: tuple[Scales, ...] = ()  # of each layer; none: all are 1

    def layer(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> KVLayer:
        return KVLayer(keys, values, self.scales[index] if self.scales else UNSCALED)

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.layers * self.heads * self.dim * self.dtype.itemsize


def as_words(pages: torch.Tensor) -> torch.Tensor:
    """Whole pages, of any dtype, as int64: few numbers to write. -> [pages, words]"""
    return pages.flatten(1).view(torch.int64)


class Arena(Protocol):
    @property
    def pages(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def layers(self) -> list[KVLayer]: ...

    def clear(self, pages: torch.Tensor) -> None:
        """Sets pages to 0 in every layer, after what was launched before. pages: int64 [n], on the
        device; some may be there more than once."""

    def resize(self, pages: int) -> None:
        """Maps or unmaps pages at the end. Raises DeviceOutOfMemory."""


class HostArena:
    """Keys and values of every layer in host memory."""

    def __init__(self, shape: KVShape, max_pages: int) -> None:
        self._of = shape
        self._shape = (PAGE_SIZE, shape.heads, shape.dim)
        self._regions = 2 * shape.layers
        self._page_bytes = math.prod(self._shape) * shape.dtype.itemsize
        self._stride = -(-max_pages * self._page_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._max_pages = max_pages
        self._pages = 0
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            self._memory = mmap.mmap(-1, self._stride * self._regions, flags=flags)
        except OSError as error:
            raise DeviceOutOfMemory(f"reserving addresses for the KV arena: {error}") from None
        flat = torch.frombuffer(self._memory, dtype=shape.dtype)
        self._flat = flat.view(self._regions, -1)[
            :, : max_pages * self._page_bytes // shape.dtype.itemsize
        ]
        self._layers: list[KVLayer] = []

    @property
    def pages(self) -> int:
        return self._pages

    @property
    def nbytes(self) -> int:
        return self._pages * self._page_bytes * self._regions

    def layers(self) -> list[KVLayer]:
        return self._layers

    def clear(self, pages: torch.Tensor) -> None:
        for layer in self._layers:
            for part in (layer.keys, layer.values):
                as_words(part).index_fill_(0, pages, 0)

    def resize(self, pages: int) -> None:
        if not 0 <= pages <= self._max_pages:
            raise DeviceOutOfMemory(f"{pages} pages, the arena has at most {self._max_pages}")
        regions = [self._flat[i].view(-1, *self._shape) for i in range(self._regions)]
        for index, region in enumerate(regions):
            if pages > self._pages:
                region[self._pages : pages].zero_()
            else:
                self._unmap(index, pages)
        self._pages = pages
        self._layers = [
            self._of.layer(i, regions[2 * i][:pages], regions[2 * i + 1][:pages])
            for i in range(self._of.layers)
        ]

    def _unmap(self, region: int, pages: int) -> None:
        start = region * self._stride + pages * self._page_bytes
        end = region * self._stride + self._pages * self._page_bytes
        # Keep an operating-system page that a kept KV page shares.
        start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        if end > start:
            self._memory.madvise(mmap.MADV_DONTNEED, start, end - start)
