"""What encoders of images compute beside their GEMMs: attention over whole sequences, both ways and
with no cache of keys and values, and what is between two GEMMs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

# What a GPU's kernels take: head sizes of attention, to which others are padded, and what these are
# multiples of; elements of a row that is normed.
HEAD_DIMS, DIM_STEP, MAX_NORM_WIDTH = (64, 128), 8, 8192


@dataclass(frozen=True, slots=True)
class Angles:
    """Of rotary embeddings: those of a patch's row for one half of the pairs, of its column for the
    other."""

    cos: torch.Tensor  # float32 [patches, head_dim / 2]
    sin: torch.Tensor

    @classmethod
    def of(cls, places: torch.Tensor, head_dim: int, theta: float) -> Angles:
        """places int64 [patches, 2]"""
        half = head_dim // 2
        steps = torch.arange(0, half, 2, dtype=torch.float32, device=places.device)
        turns = places.unsqueeze(2).float() * (1.0 / theta ** (steps / half))
        return cls(turns.cos().flatten(1), turns.sin().flatten(1))


@dataclass(frozen=True, slots=True)
class Norm:
    """A layer norm, or without a bias an RMS norm."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float


class Encoder(ABC):
    # Whether what passes allocate stays theirs. Else they give it back, and sizing leaves it free.
    keeps_memory = False

    def memory(self) -> AbstractContextManager[object]:
        """For what passes allocate."""
        return nullcontext()

    @abstractmethod
    def plan(self, lengths: Sequence[int], heads: int, dim: int) -> Any:
        """Prepares attention over sequences of so many rows each, one after the other, for all
        layers that have the same."""

    @abstractmethod
    def attend(self, qkv: torch.Tensor, plan: Any, angles: Angles | None) -> torch.Tensor:
        """softmax(q k / sqrt(dim)) v, of each row over all rows of its sequence, with queries and
        keys rotated by their angles, if any. Takes no memory for scores. qkv [rows, 3 * heads *
        dim], which it may overwrite -> [rows, heads * dim], contiguous"""

    @abstractmethod
    def norm(self, x: torch.Tensor, norm: Norm, added: torch.Tensor | None = None) -> torch.Tensor:
        """Of x with what is `added` to it in place before. [rows, width], contiguous"""

    @abstractmethod
    def linear_gelu(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        """The tanh approximation of GELU of a linear. [rows, inputs] -> [rows, outputs]"""
