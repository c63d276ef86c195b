"""Projections, what they read, and what follows them.

The format of a weight is a property of the projection. What a kernel can do to the rows that it
reads is left to it (Operand), and what it can do to its results is asked of it (Epilogue), so a
backend joins as much to a GEMM as it has kernels for, and the model says the same to all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvline_server.kernels.fp8 import Weight


@dataclass(frozen=True, slots=True)
class Projection:
    """y = x W^T + b. With several ranks each has some of the outputs, or some of the inputs: then y
    is the sum of the ranks' results, and rank 0 alone has the bias."""

    weight: Weight  # [out, in], in its format
    bias: torch.Tensor | None = None  # [out]

    def __len__(self) -> int:
        return len(self.weight)


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS norm over the last dimension."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Operand:
    """What a projection reads. What is left to it is done before the rows change: they may be the
    residual."""

    rows: torch.Tensor  # [rows, in], or of gate and up where it is gated [rows, 2 * in]
    norm: Norm | None = None  # left to who reads it
    gated: bool = False  # left to who reads it: silu of the first half, times the second

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def settled(self) -> bool:
        """Whether nothing is left to do."""
        return self.norm is None and not self.gated


@dataclass(frozen=True, slots=True)
class Store:
    """Nothing follows. -> [rows, out], in `out` if given"""

    out: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Gate:
    """Rows.activate_and_mul. -> an Operand"""

    activation: str  # silu, gelu_tanh or relu2


@dataclass(frozen=True, slots=True)
class Join:
    """The sum over ranks is normed by `after`, added to the residual, which is overwritten, and
    normed by `before`. -> an Operand of what follows"""

    residual: torch.Tensor  # [rows, hidden]
    after: Norm | None  # of the block that ends
    before: Norm | None  # of the next one
    scale: float = 1.0  # of what is added


Epilogue = Store | Gate | Join
STORE = Store()
