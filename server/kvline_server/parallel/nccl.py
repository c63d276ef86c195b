"""Ranks on GPUs that cannot map each other's memory: NCCL, which copies through the host there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from kvline_server.parallel.several import SeveralGpus

distributed: Any = torch.distributed  # whose own annotations lack what is used here
# Read at its start. NVLink multicast needs a service of the driver; a pod's ranks share a machine.
os.environ |= {"NCCL_NVLS_ENABLE": "0", "NCCL_SOCKET_IFNAME": "lo"}


class NcclGroup(SeveralGpus):
    """kernels.group.Group of one GPU each."""

    def __init__(
        self, rank: int, ranks: int, folder: Path, elements: int, dtype: torch.dtype
    ) -> None:
        """Ranks meet through a file in `folder`, which must be new to them. `elements` of the
        largest hidden states that are summed."""
        super().__init__(rank, ranks)
        store = distributed.FileStore(str(folder / "ranks"), ranks)
        self._group = distributed.ProcessGroupNCCL(store, rank, ranks)
        # It takes its memory at the first call of each kind and of a large one, so that must come
        # before anything is measured.
        device = torch.device("cuda", torch.cuda.current_device())
        self.all_reduce(torch.zeros(elements, dtype=dtype, device=device))
        for use in (self.all_gather, self.all_to_all):
            use(torch.zeros(ranks, device=device))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.sent += x.nbytes
        if self._waits:
            self._group.allreduce([x]).wait()
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self.sent += x.nbytes
        out = x.new_empty((self.ranks, *x.shape))
        if not self._waits:
            return out.copy_(x)
        self._group._allgather_base(out, x).wait()
        return out

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        self.sent += x.nbytes
        out = torch.empty_like(x)
        if not self._waits:
            return out.copy_(x)
        self._group.alltoall_base(out, x, [], []).wait()
        return out
