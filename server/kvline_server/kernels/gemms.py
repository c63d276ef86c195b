"""GEMMs of all rows of a step, with what stands before and after them."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from kvline_server.kernels.fp8 import Weight
from kvline_server.kernels.group import Group
from kvline_server.kernels.projection import (
    STORE,
    Epilogue,
    Gate,
    Join,
    Operand,
    Projection,
    Store,
)
from kvline_server.kernels.rows import Rows
from kvline_server.kernels.tuning import Choices


class Gemms(ABC):
    keeps_fp8: bool = False  # takes an Fp8Weight, of a shape that fp8.fits lets pass
    tunes: bool = False  # has kernels to choose among by trial

    def __init__(self, rows: Rows, group: Group) -> None:
        """`group` are the ranks that have the other parts of the model."""
        self.rows = rows
        self.group = group

    @abstractmethod
    def pack(self, weight: Weight) -> Weight:
        """A weight in the layout that is fastest for `project`."""

    def project(self, x: Operand, projection: Projection, then: Epilogue = STORE) -> Operand:
        """x W^T + b, and what follows it. x [rows, in] -> as the epilogue says; what Join gives is
        valid until the group's next sum"""
        if isinstance(then, Gate):
            made = self.linear(x, projection)
            return Operand(self.rows.activate_and_mul(made, then.activation))
        if isinstance(then, Store):
            return Operand(self.linear(x, projection, then.out))
        out = self.group.buffer(len(x), len(projection))
        return self.join(self.linear(x, projection, out), then)

    @abstractmethod
    def linear(
        self, x: Operand, projection: Projection, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`project` with nothing that follows. -> [rows, out], in `out` if given"""

    def join(self, made: torch.Tensor, then: Join) -> Operand:
        """What follows a rank's term of a sum. Overwrites both. [rows, hidden]"""
        made, residual = self.group.all_reduce(made), then.residual
        if then.after is not None:
            made = self.rows.rms_norm(made, then.after)
        if then.scale != 1.0:
            made = made.mul_(then.scale)
        if then.after is None and then.before is not None:
            return Operand(self.rows.add_norm(made, residual, then.before))
        residual.add_(made)
        if then.before is None:
            return Operand(residual)
        return Operand(self.rows.rms_norm(residual, then.before))

    def settle(self, x: Operand) -> torch.Tensor:
        """Its rows, with what was left to do. [rows, in]"""
        if x.norm is not None:
            return self.rows.rms_norm(x.rows, x.norm)
        return self.rows.activate_and_mul(x.rows, "silu") if x.gated else x.rows

    @abstractmethod
    def logits(self, hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """The LM head's GEMM. [rows, hidden] -> [rows, tokens of the head]"""

    def padded(self, rows: int) -> int:
        """The row count that a step of `rows` rows is padded to, where no graph is captured."""
        return rows

    def row_counts(self, largest: int) -> list[int]:
        """All results of `padded` for up to `largest` rows, to run once before memory is measured;
        empty where a new row count allocates nothing."""
        return []

    @abstractmethod
    def tune(
        self, weights: list[list[Weight]], rows: list[int], known: Choices | None
    ) -> Choices | None:
        """Autotunes GEMMs at these row counts. `weights` has a list per GEMM of a layer: its weight
        of each layer; `known` are the choices of an earlier start, which are taken over. -> the
        choices, None where there is nothing to tune"""
