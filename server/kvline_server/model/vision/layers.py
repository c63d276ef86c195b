"""A layer of a tower: attention both ways, and an MLP, on the residual in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from kvline_server.kernels.interface import Kernels
from kvline_server.model.vision.patches import ROWS
from kvline_server.model.vision.weights import LayerNorm, Linear, RmsNorm

Norm = LayerNorm | RmsNorm


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

    def rotate(self, x: torch.Tensor, rows: slice) -> None:
        """In place, in float32. x [rows, heads, head_dim]"""
        cos, sin = self.cos[rows].unsqueeze(1), self.sin[rows].unsqueeze(1)
        one, other = x.float().chunk(2, dim=-1)
        x.copy_(torch.cat((one * cos - other * sin, other * cos + one * sin), dim=-1))


@dataclass(frozen=True, slots=True)
class Mlp:
    up: Linear  # where it is gated the gate's rows before its own
    down: Linear
    gated: bool = False  # by silu; else gelu_tanh

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        made = self.up(x)
        if not self.gated:
            return self.down(functional.gelu(made, approximate="tanh"))
        gate, up = made.chunk(2, dim=-1)
        return self.down(functional.silu(gate).mul_(up))


@dataclass(frozen=True, slots=True)
class Layer:
    before: Norm
    qkv: Linear
    out: Linear
    between: Norm
    mlp: Mlp

    def run(
        self, kernels: Kernels, x: torch.Tensor, heads: int, plan: Any, angles: Angles | None
    ) -> None:
        """In place; `plan` is of Encoder. x [patches, hidden]"""
        qkv = x.new_empty(len(x), len(self.qkv.weight))
        for rows in some(len(x)):
            qkv[rows] = self.qkv(self.before(x[rows]))
            if angles is not None:
                own = qkv[rows].view(-1, 3 * heads, x.shape[1] // heads)
                angles.rotate(own[:, : 2 * heads], rows)
        q, k, v = qkv.view(len(x), 3, heads, -1).unbind(1)
        mixed = kernels.encoder.attend(q, k, v, plan).flatten(1)
        del qkv, q, k, v  # before the MLP takes as much
        for rows in some(len(x)):
            own = x[rows]
            own += self.out(mixed[rows])
            own += self.mlp(self.between(own))


@dataclass(frozen=True, slots=True)
class Merger:
    """Makes one row of the patches of a token: an MLP of them all."""

    norm: Callable[[torch.Tensor], torch.Tensor]
    joined: bool  # are they before the norm, or after it
    up: Linear
    down: Linear

    def run(self, x: torch.Tensor, patches: int, out: torch.Tensor) -> None:
        """`patches` become one row of `out`. x [rows, hidden] -> out [rows / patches, width]"""
        for rows in some(len(out), ROWS // patches):
            own = x[rows.start * patches : rows.stop * patches]
            if self.joined:
                made = self.norm(own.view(-1, patches * own.shape[1]))
            else:
                made = self.norm(own).view(-1, patches * own.shape[1])
            out[rows] = self.down(functional.gelu(self.up(made)))


def some(rows: int, at_once: int = ROWS) -> Iterator[slice]:
    """All of them, in order."""
    step = max(1, at_once)
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))
