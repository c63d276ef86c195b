"""Encoders in plain torch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

from kvline_server.kernels.encoder import Angles, Encoder, Norm

ROWS = 4096  # that are rotated at once, which takes float32 of theirs


@dataclass(frozen=True, slots=True)
class Plan:
    heads: int
    runs: list[tuple[int, int]]  # sequences that follow each other: how many, and rows of each


class TorchEncoder(Encoder):
    def plan(self, lengths: Sequence[int], heads: int, dim: int) -> Plan:
        """Those of one length are computed at once: an image has many windows."""
        runs = [(len(list(same)), length) for length, same in itertools.groupby(lengths)]
        return Plan(heads, runs)

    def attend(self, qkv: torch.Tensor, plan: Plan, angles: Angles | None) -> torch.Tensor:
        every = qkv.view(len(qkv), 3, plan.heads, -1)
        if angles is not None:
            for start in range(0, len(qkv), ROWS):
                rows = slice(start, start + ROWS)
                _rotate(every[rows, :2], angles.cos[rows], angles.sin[rows])
        queries, keys, values = every.unbind(1)
        out = torch.empty(queries.shape, dtype=qkv.dtype, device=qkv.device)
        start = 0
        for count, length in plan.runs:
            end = start + count * length
            q, k, v, into = (
                each[start:end].view(count, length, *each.shape[1:]).transpose(1, 2)
                for each in (queries, keys, values, out)
            )
            # [sequences, heads, rows, dim]; on a CPU by a kernel that keeps no scores.
            into.copy_(scaled_dot_product_attention(q, k, v))
            start = end
        return out.flatten(1)

    def norm(self, x: torch.Tensor, norm: Norm, added: torch.Tensor | None = None) -> torch.Tensor:
        if added is not None:
            x += added
        weight, width = norm.weight, norm.weight.shape
        if norm.bias is None:
            return functional.rms_norm(x, width, weight, norm.eps)
        return functional.layer_norm(x, width, weight, norm.bias, norm.eps)

    def linear_gelu(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        return functional.gelu(functional.linear(x, weight, bias), approximate="tanh")


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """In place, in float32. x [rows, 2, heads, dim], cos and sin [rows, dim / 2]"""
    cos, sin = cos[:, None, None], sin[:, None, None]
    one, other = x.float().chunk(2, dim=-1)
    x.copy_(torch.cat((one * cos - other * sin, other * cos + one * sin), dim=-1))
