"""GEMMs in plain torch: on a CPU oneDNN's."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from kvline_server.kernels.fp8 import Weight
from kvline_server.kernels.gemms import Gemms
from kvline_server.kernels.group import Group
from kvline_server.kernels.projection import Operand, Projection
from kvline_server.kernels.row_counts import compiled, padded
from kvline_server.kernels.rows import Rows
from kvline_server.kernels.sampling import LOGIT_BLOCK
from kvline_server.kernels.tuning import Choices


class TorchGemms(Gemms):
    def __init__(self, device: torch.device, dtype: torch.dtype, rows: Rows, group: Group) -> None:
        super().__init__(rows, group)
        self.device = device
        self.dtype = dtype

    def pack(self, weight: Weight) -> Weight:
        """Reorders to oneDNN's blocked layout, which is faster than the default GEMM at the few
        rows of decoding (docs/performance.md)."""
        assert isinstance(weight, torch.Tensor)  # fp8 is not kept
        if not _use_onednn(weight):
            return weight
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
        return packed

    def linear(
        self, x: Operand, projection: Projection, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert isinstance(projection.weight, torch.Tensor)  # fp8 is not kept
        made = _linear(self.settle(x), projection.weight, projection.bias)
        return made if out is None else out.copy_(made)

    def logits(self, hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """In blocks of a fixed row count, the last one padded, so that neither the chunk size nor
        a row's neighbours change a bit of its logits."""
        rows = hidden.shape[0]
        if hidden.is_cuda:  # where bits depend on more than the row count
            return _linear(hidden, head).float()
        out = torch.empty((rows, head.shape[0]), dtype=torch.float32)
        for start in range(0, rows, LOGIT_BLOCK):
            block = hidden[start : start + LOGIT_BLOCK]
            have = block.shape[0]
            if have < LOGIT_BLOCK:
                block = torch.cat((block, block.new_zeros(LOGIT_BLOCK - have, block.shape[1])))
            out[start : start + have] = _linear(block, head)[:have]
        return out

    def padded(self, rows: int) -> int:
        return padded(rows, dense=True) if self._compiles else rows

    def row_counts(self, largest: int) -> list[int]:
        return compiled(largest) if self._compiles else []

    @property
    def _compiles(self) -> bool:
        """Whether oneDNN runs the GEMMs, which compiles code for each row count."""
        return _onednn_takes(self.device.type, self.dtype)

    def tune(self, weights: list[list[Weight]], rows: list[int], known: Choices | None) -> None:
        return


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    if weight.is_mkldnn or _use_onednn(weight):
        made: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return made
    return linear(x, weight, bias)


def _use_onednn(weight: torch.Tensor) -> bool:
    return _onednn_takes(weight.device.type, weight.dtype)


def _onednn_takes(device: str, dtype: torch.dtype) -> bool:
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return device == "cpu" and dtype == torch.float32 and available
