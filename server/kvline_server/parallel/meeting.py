"""The group of one rank of several, which its kernels have from the start and which connects only
once all ranks have loaded: before, one that fails would leave the others waiting."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from kvline_contract.launch import Device
from kvline_server.kernels.group import Group


def connect(
    device: Device, rank: int, ranks: int, folder: Path, elements: int, dtype: torch.dtype
) -> Group:
    """Waits for the other ranks, which call the same. `folder` is empty at first; no hidden states
    that are summed have more than so many elements."""
    if device is Device.CPU:
        from kvline_server.parallel.groups import GlooGroup

        return GlooGroup(rank, ranks, folder)
    from kvline_server.memory.cuda import reachable
    from kvline_server.parallel.nccl import NcclGroup
    from kvline_server.parallel.symmetric import SymmetricGroup

    if not reachable(ranks):
        return NcclGroup(rank, ranks, folder, elements, dtype)
    return SymmetricGroup(rank, ranks, folder, elements, dtype)


class Meeting:
    """A Group from `meet` on."""

    def __init__(self, rank: int, ranks: int, connect: Callable[[], Group]) -> None:
        self.rank = rank
        self.ranks = ranks
        self._connect = connect
        self._met: Group | None = None

    def meet(self) -> None:
        """Waits for the other ranks, which do the same."""
        self._met = self._connect()

    @property
    def sent(self) -> int:
        return self._group.sent

    @sent.setter
    def sent(self, count: int) -> None:
        self._group.sent = count

    def buffer(self, rows: int, width: int) -> torch.Tensor | None:
        return self._group.buffer(rows, width)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return self._group.sum(x)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        self._group.add(x, residual)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._group.gather(x)

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        return self._group.exchange(x)

    def apart(self) -> AbstractContextManager[None]:
        return self._group.apart()

    @property
    def _group(self) -> Group:
        assert self._met is not None, "nothing is exchanged before all have loaded"
        return self._met
