"""GEMMs on a GPU: those of each format of weights (formats.py), with what their kernels can do in
passing to the rows before and after them."""

from __future__ import annotations

import torch
from torch.nn.functional import linear, pad

from kvline_server.kernels.formats import Formats
from kvline_server.kernels.fp8 import Weight
from kvline_server.kernels.gemms import Gemms
from kvline_server.kernels.group import Group
from kvline_server.kernels.projection import STORE, Epilogue, Gate, Join, Operand, Projection
from kvline_server.kernels.rows import Rows
from kvline_server.kernels.tuning import Choices

HEAD_TILE = 16  # rows
FEW_ROWS = 128  # whose all-reduce adds to the residual too, where the group has a kernel


class GpuGemms(Gemms):
    keeps_fp8 = True
    tunes = True

    def __init__(self, device: torch.device, rows: Rows, group: Group) -> None:
        super().__init__(rows, group)
        self.formats = Formats(device)

    def pack(self, weight: Weight) -> Weight:
        packed: Weight = self.formats.of(weight).pack(weight)
        return packed

    def project(self, x: Operand, projection: Projection, then: Epilogue = STORE) -> Operand:
        if isinstance(then, Gate) and projection.bias is None and then.activation == "silu":
            return self._gated(x, projection)
        if isinstance(then, Join) and self._added(x, projection, then):
            return Operand(then.residual, then.before)
        return super().project(x, projection, then)

    def linear(
        self, x: Operand, projection: Projection, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        weight = projection.weight
        linears = self.formats.of(weight)
        if x.norm is not None and linears.takes_row(x.rows, weight):
            return linears.row(x, weight, projection.bias, out)
        if not (x.settled or (x.gated and linears.gates)):
            x = Operand(self.settle(x))
        return linears.rows(x, weight, projection.bias, out)

    def _gated(self, x: Operand, projection: Projection) -> Operand:
        linears = self.formats.of(projection.weight)
        if x.norm is not None and linears.takes_row(x.rows, projection.weight):
            return Operand(linears.row(x, projection.weight, gated=True))
        made = self.linear(x, projection)
        if linears.gates and len(made) > 1:  # so does what reads it, where all are of one format
            return Operand(made, gated=True)
        return Operand(self.rows.activate_and_mul(made, "silu"))

    def _added(self, x: Operand, projection: Projection, then: Join) -> bool:
        """Adds the sum over ranks to the residual where a kernel does that in passing, and the next
        one norms; else nothing is done."""
        if then.after is not None or then.before is None or then.scale != 1.0:
            return False
        weight, bias = projection.weight, projection.bias
        linears = self.formats.of(weight)
        one = x.settled and linears.takes_row(x.rows, weight)
        if self.group.ranks == 1:
            if one:
                linears.row(x, weight, bias, then.residual, added=True)
            return one
        if len(x) > FEW_ROWS:
            return False
        out = self.group.buffer(len(x), len(projection))
        made = linears.row(x, weight, bias, out) if one else self.linear(x, projection, out)
        self.group.all_reduce_add(made, then.residual)
        return True

    def logits(self, hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """Row counts beyond a tile are padded to whole ones: cuBLAS looks for a kernel at each row
        count that it has not met, on the host."""
        rows = len(hidden)
        more = -rows % HEAD_TILE if rows > HEAD_TILE else 0
        return linear(pad(hidden, (0, 0, 0, more)), head)[:rows]

    def tune(
        self, weights: list[list[Weight]], rows: list[int], known: Choices | None
    ) -> Choices | None:
        if known is None:
            self.formats.tune(weights, rows)
        else:
            self.formats.take(weights, known)
        return self.formats.choices
