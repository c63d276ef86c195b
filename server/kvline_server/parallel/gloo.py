"""Groups of several ranks (kernels/group.py): `GlooGroup` for processes on one machine's CPU."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from kvline_server.errors import RankLost
from kvline_server.parallel.several import Several

distributed: Any = torch.distributed  # whose own annotations lack what is used here
LOOPBACK = "lo"  # the network interface; ranks of a pod share one machine
SECONDS = 300.0  # for the slowest rank to call what the others wait for
WIDENED = (torch.bfloat16, torch.float16)  # dtypes whose sums are made in float32


class GlooGroup(Several):
    """Ranks meet through a file in `folder`, which must be new to them, and talk through the
    loopback interface. Raises RankLost where a peer is gone or does not answer in time."""

    def __init__(self, rank: int, ranks: int, folder: Path, seconds: float = SECONDS) -> None:
        super().__init__(rank, ranks)
        options = distributed.ProcessGroupGloo._Options()
        options._devices = [distributed.ProcessGroupGloo.create_device(interface=LOOPBACK)]
        options._timeout = timedelta(seconds=seconds)
        options._threads = 1
        try:
            self._store = distributed.FileStore(str(folder / "ranks"), ranks)
            self._store.set_timeout(options._timeout)
            self._group = distributed.ProcessGroupGloo(self._store, rank, ranks, options)
        except RuntimeError as error:
            raise self._lost(error) from error

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype in WIDENED:
            return x.copy_(self.all_reduce(x.float()))
        self.sent += x.nbytes
        if self._apart:
            return x.mul_(self.ranks)
        whole = x.contiguous()
        self._wait(self._group.allreduce, [whole])
        return x if whole is x else x.copy_(whole)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self.sent += x.nbytes
        if self._apart:
            return torch.stack([x] * self.ranks).clone()  # gloo has a buffer of its own
        made = x.new_empty((self.ranks, *x.shape))
        self._wait(self._group.allgather, [list(made.unbind(0))], [x.contiguous()])
        return made

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        self.sent += x.nbytes
        if self._apart:
            return x.clone()
        made = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._wait(self._group.alltoall_base, made, x.contiguous(), [], [])
        return made

    def close(self) -> None:
        """Waits for nobody."""
        self._group.abort()

    def _wait(self, begin: Any, *tensors: Any) -> None:
        try:
            begin(*tensors).wait()
        except RuntimeError as error:  # a broken connection, or no answer in time
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> RankLost:
        text = str(error).splitlines()[0].rpartition("] ")[2]  # without gloo's own line number
        return RankLost(f"rank {self.rank} of {self.ranks} waits for another, in vain: {text:.160}")
