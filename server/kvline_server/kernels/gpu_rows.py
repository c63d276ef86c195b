"""Norms and activations by FlashInfer."""

from __future__ import annotations

import flashinfer
import torch
from flashinfer import norm as norms

from kvline_server.kernels.projection import Norm
from kvline_server.kernels.rows import Rows


class GpuRows(Rows):
    def rms_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        out: torch.Tensor = norms.rmsnorm(x, norm.weight, eps=norm.eps)
        return out

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> torch.Tensor:
        norms.fused_add_rmsnorm(x, residual, norm.weight, eps=norm.eps)
        return x

    def activate_and_mul(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        if activation == "relu2":
            return x.relu().square_()
        gates = {"silu": flashinfer.silu_and_mul, "gelu_tanh": flashinfer.gelu_tanh_and_mul}
        out: torch.Tensor = gates[activation](x)
        return out
