"""GPU memory: the driver's accounting, and the KV arena in CUDA virtual memory.

Addresses for the whole GPU are reserved once, and physical memory is mapped up to the budget, so
resizing keeps all pointers valid, also those in captured graphs. Running out of memory while
mapping is an error code of the driver and does not break the CUDA context.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from cuda.bindings import driver

from kvline_server.errors import DeviceFailure, DeviceOutOfMemory
from kvline_server.memory.arena import KVLayer, KVShape, as_words
from kvline_server.memory.pages import PAGE_SIZE

SLACK = 64 << 20
CHUNK = 64 << 20  # of one mapping; large for few calls, and the granularity of shrinking


def reachable(gpus: int) -> bool:
    """Whether each of the first GPUs can map the memory of the others, and change it atomically."""
    wanted = driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    return all(
        torch.cuda.can_device_access_peer(a, b)
        and call(driver.cuDeviceGetP2PAttribute, wanted, a, b)
        for a, b in itertools.permutations(range(gpus), 2)
    )


class CudaDevice:
    """The GPU that is torch's current one; `used` covers all processes, as the driver counts."""

    gpu = True

    def __init__(self) -> None:
        self.index = torch.cuda.current_device()
        self.name = torch.cuda.get_device_properties(self.index).name
        self.driver = _driver_version()
        self.limit = torch.cuda.mem_get_info(self.index)[1]

    @property
    def slack(self) -> int:
        """torch allocates segments of up to 20 MiB, so the same steps in another order, or after
        its cache was emptied, need a few more or fewer. Without this margin a budget failed by a
        few MiB, and the retry lost 5 % of it."""
        return SLACK

    def used(self) -> int:
        free, total = torch.cuda.mem_get_info(self.index)
        return total - free

    def now(self) -> int:
        return torch.cuda.memory_reserved(self.index)

    def peak(self) -> int:
        """Reserved, not allocated: no other process can use free blocks of the allocator."""
        return torch.cuda.max_memory_reserved(self.index)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.index)

    def keep_peak(self, again: bool) -> bool:
        return True

    def working_files(self) -> int:
        return 0

    def settle(self) -> None:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    @contextmanager
    def held(self, nbytes: int) -> Iterator[None]:
        """Allocated outside torch's allocator, which would otherwise reuse it."""
        if not nbytes:
            yield
            return
        torch.cuda.empty_cache()
        pointer = call(driver.cuMemAlloc, nbytes)
        try:
            call(driver.cuMemsetD8, pointer, 1, nbytes)
            yield
        finally:
            call(driver.cuMemFree, pointer)


class CudaArena:
    """The keys and values of all layers of a page are contiguous, so that one mapping holds a page:
    [pages, layers, keys and values, page, kv_heads, dim]."""

    def __init__(self, shape: KVShape, max_pages: int) -> None:
        self._of = shape
        self._shape = (shape.layers, 2, PAGE_SIZE, shape.heads, shape.dim)
        self._page_bytes = PAGE_SIZE * shape.bytes_per_token
        self._max_pages = max_pages
        self._pages = 0
        self._properties = _allocation_properties()
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self._step: int = call(driver.cuMemGetAllocationGranularity, self._properties, minimum)
        reserved = self._rounded(max_pages * self._page_bytes)
        self._base = int(call(driver.cuMemAddressReserve, reserved, 0, 0, 0))
        self._mapped: list[tuple[int, int, Any]] = []  # offset, size, handle
        self._layers: list[KVLayer] = []
        self._words = torch.empty(0, 0, dtype=torch.int64, device="cuda")

    @property
    def pages(self) -> int:
        return self._pages

    @property
    def nbytes(self) -> int:
        return self._end()

    def layers(self) -> list[KVLayer]:
        return self._layers

    def clear(self, pages: torch.Tensor) -> None:
        self._words.index_fill_(0, pages, 0)

    def resize(self, pages: int) -> None:
        if not 0 <= pages <= self._max_pages:
            raise DeviceOutOfMemory(f"{pages} pages, the arena has at most {self._max_pages}")
        torch.cuda.synchronize()  # nothing in flight may touch what is unmapped
        wanted = self._rounded(pages * self._page_bytes)
        while self._mapped and self._end() > wanted:
            self._unmap_last()
        while self._end() < wanted:
            self._map(min(CHUNK, wanted - self._end()))
        self._pages = pages
        self._layers = self._views(pages)

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self._step) * self._step

    def _end(self) -> int:
        return self._mapped[-1][0] + self._mapped[-1][1] if self._mapped else 0

    def _map(self, size: int) -> None:
        at = self._end()
        try:
            handle = call(driver.cuMemCreate, size, self._properties, 0)
        except DeviceOutOfMemory:
            torch.cuda.empty_cache()  # torch may cache the memory that is missing
            handle = call(driver.cuMemCreate, size, self._properties, 0)
        call(driver.cuMemMap, self._base + at, size, 0, handle, 0)
        self._mapped.append((at, size, handle))
        access = driver.CUmemAccessDesc()
        access.location = self._properties.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        call(driver.cuMemSetAccess, self._base + at, size, [access], 1)
        call(driver.cuMemsetD8, self._base + at, 0, size)

    def _unmap_last(self) -> None:
        offset, size, handle = self._mapped.pop()
        call(driver.cuMemUnmap, self._base + offset, size)
        call(driver.cuMemRelease, handle)

    def _views(self, pages: int) -> list[KVLayer]:
        if not pages:
            return []
        taken = _Range(self._base, pages * self._page_bytes)
        flat = torch.as_tensor(taken, device="cuda").view(self._of.dtype)
        whole = flat.view(pages, *self._shape)
        self._words = as_words(whole)  # a page of all layers is one range
        return [self._of.layer(i, whole[:, i, 0], whole[:, i, 1]) for i in range(self._of.layers)]


class _Range:
    """An address range for torch.as_tensor, as bytes: the interface has no bfloat16 and no fp8."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (pointer, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def _allocation_properties() -> Any:
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = torch.cuda.current_device()
    return properties


def _driver_version() -> str:
    """The NVIDIA driver's version where NVML reports it, else the CUDA version it supports."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # NVML is optional, and its errors share no base class
        return f"cuda-{call(driver.cuDriverGetVersion)}"


def call(function: Any, *arguments: Any) -> Any:
    """Calls the driver and returns the result. Raises DeviceOutOfMemory or DeviceFailure."""
    code, *values = function(*arguments)
    if code == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise DeviceOutOfMemory(function.__name__)
    if code != driver.CUresult.CUDA_SUCCESS:
        raise DeviceFailure(f"{function.__name__}: {code.name}")
    return values[0] if values else None
