"""Norms and activations in plain torch."""

from __future__ import annotations

import torch
from torch.nn import functional
from torch.nn.functional import gelu, silu

from kvline_server.kernels.projection import Norm
from kvline_server.kernels.rows import Rows

ALPHA, LIMIT = 1.702, 7.0  # of swiglu_oai: of the sigmoid, and what both halves are clamped to


class TorchRows(Rows):
    def rms_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return functional.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> torch.Tensor:
        return self.rms_norm(residual.add_(x), norm)

    def activate_and_mul(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        if activation == "relu2":
            return x.relu().square_()
        gate, up = x.chunk(2, dim=-1)
        if activation == "swiglu_oai":
            gate = gate.clamp(max=LIMIT)
            return gate.mul_(torch.sigmoid(ALPHA * gate)).mul_(up.clamp(-LIMIT, LIMIT).add_(1))
        return (silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")).mul_(up)
