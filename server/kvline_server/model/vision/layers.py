"""A layer of a tower: attention both ways, and an MLP, on the residual in place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from kvline_server.kernels.encoder import Angles, Norm
from kvline_server.kernels.interface import Kernels
from kvline_server.model.vision.patches import ROWS
from kvline_server.model.vision.weights import Linear


@dataclass(frozen=True, slots=True)
class Mlp:
    up: Linear  # where it is gated the gate's rows before its own
    down: Linear
    gated: bool = False  # by silu; else gelu_tanh

    def run(self, kernels: Kernels, x: torch.Tensor) -> torch.Tensor:
        """[patches, hidden] -> the same"""
        if not self.gated:
            assert self.up.bias is not None
            return self.down(kernels.encoder.linear_gelu(x, self.up.weight, self.up.bias))
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate).mul_(up))


@dataclass(frozen=True, slots=True)
class Layer:
    before: Norm
    qkv: Linear
    out: Linear
    between: Norm
    mlp: Mlp

    def run(self, kernels: Kernels, x: torch.Tensor, plan: Any, angles: Angles | None) -> None:
        """In place; `plan` is of Encoder. x [patches, hidden]"""
        qkv = x.new_empty(len(x), len(self.qkv.weight))
        for rows in some(len(x)):
            self.qkv.into(kernels.encoder.norm(x[rows], self.before), qkv[rows])
        mixed = kernels.encoder.attend(qkv, plan, angles)
        del qkv  # before the MLP takes as much
        for rows in some(len(x)):
            own, made = x[rows], self.out(mixed[rows])
            own += self.mlp.run(kernels, kernels.encoder.norm(own, self.between, made))


@dataclass(frozen=True, slots=True)
class Merger:
    """Makes one row of the patches of a token: an MLP of them all."""

    norm: Norm
    joined: bool  # are they before the norm, or after it
    up: Linear
    down: Linear

    def run(self, kernels: Kernels, x: torch.Tensor, patches: int, out: torch.Tensor) -> None:
        """`patches` become one row of `out`. x [rows, hidden] -> out [rows / patches, width]"""
        for rows in some(len(out), ROWS // patches):
            own = x[rows.start * patches : rows.stop * patches]
            if self.joined:
                made = kernels.encoder.norm(own.view(-1, patches * own.shape[1]), self.norm)
            else:
                made = kernels.encoder.norm(own, self.norm).view(-1, patches * own.shape[1])
            out[rows] = self.down(functional.gelu(self.up(made)))


def some(rows: int, at_once: int = ROWS) -> Iterator[slice]:
    """All of them, in order."""
    step = max(1, at_once)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))
