"""Ranks on GPUs that reach each other's memory: torch's symmetric memory.

A buffer of each rank is mapped into all of them, and kernels of torch add the buffers over NVLink.
For the sizes of a step they are faster than NCCL, take no memory beside the buffers, and run in
captured graphs (docs/decisions/034). NVLink multicast is never used.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.distributed._symmetric_memory

from kvline_server.kernels import cuda_all_reduce
from kvline_server.kernels.group import TABLE_BYTES
from kvline_server.parallel.several import SeveralGpus

distributed: Any = torch.distributed  # whose own annotations lack what is used here
symmetric: Any = torch.distributed._symmetric_memory
# Read when memory is shared. Multicast needs a service of the driver, and a program that uses it
# can put GPUs that others share out of service.
os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
_register: Any = torch._C._distributed_c10d._register_process_group
NAME = "ranks"
SECONDS = 300.0  # for the other ranks to come
SMALL_BYTES = 2 << 20  # of hidden states for which `buffer` has two halves, at most
ALIGN = 1024
HALVES = 2  # one is written while another rank still reads the other


class SymmetricGroup(SeveralGpus):
    """kernels.group.Group of one GPU each. All-reduces are made where a linear wrote, in `buffer`.
    Graphs may hold them, but none of the other collectives. They come in pairs, as the two of a
    layer do, in a graph and between graphs: each graph begins with the same half."""

    def __init__(
        self, rank: int, ranks: int, folder: Path, elements: int, dtype: torch.dtype
    ) -> None:
        """Ranks meet through a file in `folder`, which must be new to them. `elements` of the
        largest hidden states that are summed."""
        super().__init__(rank, ranks)
        small = SMALL_BYTES // dtype.itemsize
        sizes = (
            elements * dtype.itemsize,
            HALVES * SMALL_BYTES,
            torch.int32.itemsize * cuda_all_reduce.PROGRAMS * ranks,
            ranks * cuda_all_reduce.INBOX_BYTES,
            HALVES * TABLE_BYTES,
        )
        hidden, halves, flags, inbox, tables = itertools.accumulate((0, *sizes[:-1]), _aligned)
        store = distributed.FileStore(str(folder / "ranks"), ranks)
        store.set_timeout(timedelta(seconds=SECONDS))
        # Symmetric memory takes ranks and store from a group of this name, and nothing else.
        self._group = distributed.ProcessGroup(store, rank, ranks)
        self._group._set_group_name(NAME)
        _register(NAME, self._group)
        device = torch.device("cuda", torch.cuda.current_device())
        size = tables + sizes[-1]
        self._memory: torch.Tensor = symmetric._SymmetricMemory.empty_strided_p2p(
            (size,), (1,), torch.uint8, device
        )
        self._shown: Any = symmetric.rendezvous(self._memory, NAME)
        self._hidden: torch.Tensor = self._memory[hidden : hidden + sizes[0]].view(dtype)
        self._halves: torch.Tensor = (
            self._memory[halves : halves + sizes[1]].view(dtype).view(HALVES, small)
        )
        # Where each rank's half is, by half.
        self._parts = [self._pointers(halves + at * SMALL_BYTES) for at in range(HALVES)]
        self._turn = 0  # which half of it is written next
        # What the kernels are made for.
        self._fused = dtype == torch.bfloat16 and torch.cuda.get_device_capability() >= (9, 0)
        # What `buffer` gives: the half, or None for the memory of many rows.
        self._places: dict[int, int | None] = {self._hidden.data_ptr(): None}
        self._places |= {half.data_ptr(): at for at, half in enumerate(self._halves)}
        self._flags, self._inboxes = self._pointers(flags), self._pointers(inbox)
        self._epochs = torch.zeros(cuda_all_reduce.PROGRAMS, dtype=torch.int32, device=device)
        # Every rank's tables, as this rank sees them.
        views = [self._shown.get_buffer(r, (size,), torch.uint8) for r in range(ranks)]
        self._seen = [view[tables:] for view in views]
        self._half = 0
        self._memory.zero_()
        self._shown.barrier()  # every rank's flags and inboxes are 0
        self._warm_up(elements, dtype)

    def _pointers(self, offset: int) -> torch.Tensor:
        """To this byte of each rank's memory, on the device. int64 [ranks]"""
        return torch.tensor([at + offset for at in self._shown.buffer_ptrs], device="cuda")

    def _warm_up(self, elements: int, dtype: torch.dtype) -> None:
        """Loads every kernel, while nothing is measured yet."""
        few = cuda_all_reduce.ALIGN
        # Of one_shot_ll and one_shot; beyond, an all-reduce takes two shots.
        most = (cuda_all_reduce.LL_BYTES // dtype.itemsize, len(self._halves[0]))
        for count in (few, *(min(elements, each + few) for each in most)):
            residual = torch.zeros((1, count), dtype=dtype, device="cuda")
            for use in (self.all_reduce, partial(self.all_reduce_add, residual=residual)) * HALVES:
                use(self.buffer(1, count).zero_())
        self.all_gather(self._flags)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what this took is no memory of the exchange

    @contextmanager
    def apart(self) -> Iterator[None]:
        assert not self._turn, "an odd number of all-reduces came before"
        try:
            with super().apart():
                yield
            assert not self._turn, "a graph has an odd number of all-reduces"
        finally:
            self._turn = 0

    def buffer(self, rows: int, width: int) -> torch.Tensor:
        count = rows * width
        # A half may still be read by a rank that is behind, until its next sum.
        if count > len(self._halves[0]) or not self._waits:
            return self._hidden[:count].view(rows, width)
        self._turn = 1 - self._turn
        return self._halves[self._turn][:count].view(rows, width)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if x.data_ptr() not in self._places:
            shown = self._memory[: x.nbytes].view(x.dtype).view(x.shape)
            return x.copy_(self.all_reduce(shown.copy_(x)))
        self.sent += x.nbytes
        if self._waits:
            torch.ops.symm_mem.two_shot_all_reduce_(x, "sum", NAME)
        return x

    def all_reduce_add(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        half = self._places.get(x.data_ptr())
        if half is None or not self._fused or residual.numel() % cuda_all_reduce.ALIGN:
            super().all_reduce_add(x, residual)
            return
        self.sent += x.nbytes
        who = self.rank, self.ranks
        if cuda_all_reduce.fits_ll(x, self.ranks):
            cuda_all_reduce.one_shot_ll(self._inboxes.data_ptr(), self._epochs, x, residual, *who)
            return
        parts, flags = self._parts[half].data_ptr(), self._flags.data_ptr()
        cuda_all_reduce.one_shot(parts, flags, residual, *who)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((self.ranks, *x.shape))
        self._read(x, [x] * self.ranks, [0] * self.ranks, out)
        return out

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        self._read(x, list(x), [self.rank * x[0].nbytes] * self.ranks, out)
        return out

    def _read(
        self, x: torch.Tensor, own: list[torch.Tensor], starts: list[int], out: torch.Tensor
    ) -> None:
        """Shows x to all ranks, and copies a part of each rank's to `out`: from byte starts[rank]
        on, or own[rank] where nothing is exchanged."""
        assert x.nbytes <= TABLE_BYTES and x.is_contiguous()
        self.sent += x.nbytes
        if not self._waits:
            for part, into in zip(own, out, strict=True):
                into.copy_(part)
            return
        self._half = 1 - self._half
        at = self._half * TABLE_BYTES
        self._seen[self.rank][at : at + x.nbytes].copy_(_bytes(x))
        # Who has passed it has read what is in the other half, which is written next.
        self._shown.barrier()
        for seen, start, into in zip(self._seen, starts, out, strict=True):
            _bytes(into).copy_(seen[at + start : at + start + into.nbytes])


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)


def _aligned(start: int, size: int) -> int:
    """Where what follows begins."""
    return -(-(start + size) // ALIGN) * ALIGN
