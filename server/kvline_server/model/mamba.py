"""Mamba2 as a block, in the place of attention: in two halves, as delta_rule.DeltaRule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import silu

from kvline_server.kernels.interface import Kernels
from kvline_server.kernels.projection import Join, Norm, Operand, Projection, Store
from kvline_server.kernels.recurrent import Recurrent, Scan, States
from kvline_server.model.blocks import layer_norm, norm_across
from kvline_server.model.config import ModelConfig
from kvline_server.model.hybrid import Mamba2
from kvline_server.model.linear import Output, Rows, Tensors, fused, projection
from kvline_server.model.recurrent_weights import convolution, decay, in_float32


@dataclass(frozen=True, slots=True)
class Projected:
    """Of one layer, between the halves of its block: parts of one GEMM's output."""

    gate: torch.Tensor  # [rows, heads * head_dim]
    xbc: torch.Tensor  # [rows, heads * head_dim + 2 * groups * state_dim]
    dt: torch.Tensor  # [rows, heads]


class Mamba:
    def __init__(
        self,
        tensors: Tensors,
        config: ModelConfig,
        mamba: Mamba2,
        at: str,
        norm: str | None,
        multiplier: float = 1.0,
    ) -> None:
        """`at` is the prefix of the layer's tensors, `norm` the name of the one before it. What it
        adds to the residual is multiplied by `multiplier` (Granite's residual_multiplier). A rank
        has some heads, with their groups; the one group is on all ranks."""
        c, m, own, shard = config, mamba, at + mamba.at, tensors.shard
        self.before = layer_norm(tensors, c, at, norm)
        self.multiplier = multiplier
        heads, inner, dim = shard.of(m.heads), shard.of(m.inner), m.state_dim
        self.sizes = m.share(shard.ranks)  # of this rank
        self.across = m.groups == 1 and shard.ranks > 1  # the norm's elements are on all ranks
        groups = range(1) if m.groups == 1 else shard.of(m.groups)
        shared = range(groups.start * dim, groups.stop * dim)
        mixed = [Output([inner], m.inner), *[Output([shared], m.groups * dim)] * 2]
        outputs = [Output([inner], m.inner), *mixed, Output([heads], m.heads)]
        inputs = fused(own, ("in_proj",), outputs)
        self.inputs = projection(tensors, inputs, c.hidden, m.bias)
        channels = [part.rows for part in fused("", ("",), mixed)]
        every = sum(each.of for each in mixed)
        self.layer = Scan(
            heads=self.sizes.heads,
            head_dim=m.head_dim,
            groups=self.sizes.groups,
            state_dim=dim,
            convolution=convolution(tensors, own, channels, every, m.width, m.convolution_bias),
            decay=decay(tensors, own, heads, m.heads),
            skip=in_float32(tensors, own + "D", heads, m.heads),
        )
        weight = tensors.get([Rows(own + "norm.weight", inner, m.inner)])
        self.norm = Norm(weight, c.norm_eps)
        output = [Rows(own + "out_proj", range(c.hidden), c.hidden)]
        self.output = projection(tensors, output, m.inner, m.bias, inner)

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.inputs, self.output

    def project(self, kernels: Kernels, x: Operand) -> Projected:
        """x [rows, hidden]"""
        every = kernels.gemms.project(x, self.inputs).rows
        sizes = [self.sizes.inner, self.sizes.inputs[1], self.sizes.heads]
        return Projected(*torch.split(every, sizes, dim=1))

    def run(
        self,
        recurrent: Recurrent,
        projected: Projected,
        states: States,
        plan: Any,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The scan, which updates the states. -> [rows, heads * head_dim]"""
        return recurrent.scan(projected.xbc, projected.dt, self.layer, states, plan, out)

    def finish(
        self,
        kernels: Kernels,
        recurrent: Recurrent,
        made: torch.Tensor,
        projected: Projected,
        then: Join,
    ) -> Operand:
        """From the scan to the residual, with the norm of what follows. `made` is what run gave."""
        if self.across:
            gated = made.float() * silu(projected.gate.float())
            norm_across(kernels, [(gated, self.norm)])
            gated = gated.to(made.dtype)
        else:
            gated = recurrent.gate_then_norm(made, projected.gate, self.norm, self.layer.groups)
        if self.multiplier == 1.0:
            return kernels.gemms.project(Operand(gated), self.output, then)
        store = Store(kernels.group.buffer(len(gated), len(self.output)))
        summed = kernels.gemms.project(Operand(gated), self.output, store).rows
        return kernels.gemms.join(summed.mul_(self.multiplier), then)
