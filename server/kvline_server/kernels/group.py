"""Collectives of the ranks of a model: of hidden states, and of small tables about logits.

Every rank calls the same in the same order, with the same shapes. `parallel` has the groups of
several ranks; a single one has nothing to exchange.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

TABLE_BYTES = 16 << 20  # of what a rank gives to one gather or exchange, at most


class Group(Protocol):
    rank: int
    ranks: int
    sent: int  # bytes that this rank has given to collectives, also to those that ran apart

    def buffer(self, rows: int, width: int) -> torch.Tensor | None:
        """Where a kernel may write what is all-reduced next, to save a copy. None: anywhere.
        [rows, width], valid until the next all-reduce has been read"""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place or in memory of the group. -> the shape of x"""

    def all_reduce_add(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        """Adds the sum over ranks to the residual, in place. Both of one shape"""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's x, by rank. [...] -> [ranks, ...]"""

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Part r of x goes to rank r. -> the part of each rank that is for this one, by rank.
        [ranks, ...] -> [ranks, ...]"""

    def apart(self) -> AbstractContextManager[None]:
        """Within it nothing is exchanged and nobody is waited for: this rank's own numbers stand
        for those of the others. Memory is taken as when they exchange."""


class Alone:
    """The group of a single rank."""

    rank, ranks, sent = 0, 1, 0

    def buffer(self, rows: int, width: int) -> torch.Tensor | None:
        return None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_reduce_add(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        residual.add_(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(0)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        return x

    @contextmanager
    def apart(self) -> Iterator[None]:
        yield


ALONE = Alone()
