"""What a backend of kernels must do. One object an engine; it knows device and number format.

The decoder is written against this alone. Tensors are the backend's own; the layout is host
numbers, planned once a step and then used by every layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from kvline_server.kernels.layout import Layout


@dataclass(frozen=True, slots=True)
class KVLayer:
    """One layer's slice of the arena."""

    keys: torch.Tensor  # [pages, page, kv_heads, dim]
    values: torch.Tensor  # [pages, page, kv_heads, dim]


class Kernels(Protocol):
    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, hidden states and KV cache."""

    def tensor(self, array: np.ndarray) -> torch.Tensor:
        """The array on the device."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """A product's weight in the layout that `linear` likes best."""

    def plan(self, layout: Layout) -> Any:
        """What `attention` needs for a step, the same for every layer."""

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [rows, in] times weight [out, in]. -> [rows, out]"""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Over the last dimension."""

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of x and residual, normed, and the sum itself. Both inputs are used up."""

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """silu of the first half times the second. [rows, 2 * d] -> [rows, d]"""

    def rope_table(self, inverse_frequencies: torch.Tensor, positions: int) -> torch.Tensor:
        """cos and sin of every position, in the form that `attention` wants."""

    def attention(
        self,
        q: torch.Tensor,  # [rows, heads, dim]
        k: torch.Tensor,  # [rows, kv_heads, dim]
        v: torch.Tensor,  # [rows, kv_heads, dim]
        rope: torch.Tensor,
        cache: KVLayer,
        plan: Any,
    ) -> torch.Tensor:
        """Turns q and k by their positions, appends k and v to the cache, attends causally.
        -> [rows, heads * dim]"""
