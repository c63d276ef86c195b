"""Attention of encoders: over whole sequences, both ways, and with no cache of keys and values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class Encoder(ABC):
    def memory(self) -> AbstractContextManager[object]:
        """For what passes allocate: where others take what is freed, it is kept for passes. On a
        CPU they give it back, and sizing leaves as much free."""
        return nullcontext()

    @abstractmethod
    def plan(self, lengths: Sequence[int]) -> Any:
        """Prepares attention over sequences of so many rows each, one after the other, for all
        layers that have the same."""

    @abstractmethod
    def attend(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: Any
    ) -> torch.Tensor:
        """softmax(q k / sqrt(dim)) v, of each row over all rows of its sequence. Takes no memory
        for scores. Each [rows, heads, dim], whose rows may be apart -> the same, contiguous"""
