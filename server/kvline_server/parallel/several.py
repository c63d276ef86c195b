"""What the groups of several ranks (kernels/group.py) have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Several:
    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self.sent = rank, ranks, 0
        self._apart = False

    def buffer(self, rows: int, width: int) -> torch.Tensor | None:
        return None

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor: ...

    def all_reduce_add(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        residual.add_(self.all_reduce(x))

    @contextmanager
    def apart(self) -> Iterator[None]:
        self._apart = True
        try:
            yield
        finally:
            self._apart = False


class SeveralGpus(Several):
    @property
    def _waits(self) -> bool:
        """Whether ranks wait for each other. A graph is captured as it will be replayed, and waits
        for nobody meanwhile."""
        return not self._apart or torch.cuda.is_current_stream_capturing()
