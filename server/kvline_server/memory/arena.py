"""The KV cache's memory: addresses reserved once, pages made resident up to the budget.

Growing and shrinking keep addresses, so whatever points into the arena stays valid. On the CPU the
reservation is an anonymous mapping; resident means touched, so the kernel counts it now and not
under the first unlucky request.
"""

from __future__ import annotations

import mmap
from typing import Protocol

import torch

from kvline_server.errors import DeviceOutOfMemory
from kvline_server.kernels.interface import KVLayer
from kvline_server.memory.pages import PAGE_SIZE
from kvline_server.model.config import ModelConfig

_MAP_NORESERVE = 0x4000  # Linux; a reservation is not a promise of memory


class Arena(Protocol):
    @property
    def pages(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def layers(self) -> list[KVLayer]: ...

    def resize(self, pages: int) -> None:
        """Maps or gives back pages at the end. Raises DeviceOutOfMemory when the device refuses."""


class HostArena:
    """Keys and values of every layer in host memory."""

    def __init__(self, config: ModelConfig, max_pages: int, dtype: torch.dtype) -> None:
        shape = (PAGE_SIZE, config.kv_heads, config.head_dim)
        self._shape = shape
        self._regions = 2 * config.layers
        self._page_bytes = shape[0] * shape[1] * shape[2] * dtype.itemsize
        self._stride = -(-max_pages * self._page_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._max_pages = max_pages
        self._pages = 0
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            self._memory = mmap.mmap(-1, self._stride * self._regions, flags=flags)
        except OSError as error:
            raise DeviceOutOfMemory(f"reserving addresses for the KV arena: {error}") from None
        flat = torch.frombuffer(self._memory, dtype=dtype)
        self._flat = flat.view(self._regions, -1)[
            :, : max_pages * self._page_bytes // dtype.itemsize
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

    def resize(self, pages: int) -> None:
        if not 0 <= pages <= self._max_pages:
            raise DeviceOutOfMemory(f"{pages} pages, the whole device has {self._max_pages}")
        regions = [self._flat[i].view(-1, *self._shape) for i in range(self._regions)]
        for index, region in enumerate(regions):
            if pages > self._pages:
                region[self._pages : pages].zero_()
            else:
                self._give_back(index, pages)
        self._pages = pages
        self._layers = [
            KVLayer(keys=regions[i][:pages], values=regions[i + 1][:pages])
            for i in range(0, self._regions, 2)
        ]

    def _give_back(self, region: int, pages: int) -> None:
        start = region * self._stride + pages * self._page_bytes
        end = region * self._stride + self._pages * self._page_bytes
        start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE  # a shared page stays with its owner
        if end > start:
            self._memory.madvise(mmap.MADV_DONTNEED, start, end - start)
