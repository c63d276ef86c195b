"""Ranks on GPUs that cannot map each other's memory: NCCL, which copies through the host there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import distributed

from kvline_server.parallel.groups import meet


class NcclGroup:
    """kernels.group.Group of one GPU each."""

    def __init__(self, rank: int, ranks: int, folder: Path) -> None:
        self.rank, self.ranks, self.sent = rank, ranks, 0
        self._apart = False
        meet(rank, ranks, folder)
        self._group = distributed.new_group(backend="nccl")
        # It takes its memory at the first call of each kind, before anything is measured.
        some = torch.zeros(ranks, device=torch.device("cuda", torch.cuda.current_device()))
        for use in (self.sum, self.gather, self.exchange):
            use(some)
        torch.cuda.synchronize()

    @contextmanager
    def apart(self) -> Iterator[None]:
        self._apart = True
        try:
            yield
        finally:
            self._apart = False

    @property
    def _waits(self) -> bool:
        """Whether ranks wait for each other: a capture waits for nobody."""
        return not self._apart or torch.cuda.is_current_stream_capturing()

    def buffer(self, rows: int, width: int) -> torch.Tensor | None:
        return None

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        self.sent += x.nbytes
        if self._waits:
            distributed.all_reduce(x, group=self._group)
        return x

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        residual.add_(self.sum(x))

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        self.sent += x.nbytes
        out = x.new_empty((self.ranks, *x.shape))
        if not self._waits:
            return out.copy_(x)
        distributed.all_gather_into_tensor(out, x, group=self._group)
        return out

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        self.sent += x.nbytes
        out = torch.empty_like(x)
        if not self._waits:
            return out.copy_(x)
        distributed.all_to_all_single(out, x, group=self._group)
        return out
