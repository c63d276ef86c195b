"""Mamba2 as a mixer, in the place of attention."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import silu

from kvline_server.kernels.interface import Kernels
from kvline_server.kernels.projection import Join, Norm, Operand, Projection, Store
from kvline_server.kernels.recurrent import Scan, States
from kvline_server.memory.groups import Memory
from kvline_server.model.blocks import layer_norm, norm_across
from kvline_server.model.config import ModelConfig
from kvline_server.model.hybrid import Mamba2
from kvline_server.model.linear import Output, Rows, Tensors, fused, projection
from kvline_server.model.mixer import Made, Mixer, Place, Projected
from kvline_server.model.recurrent_weights import convolution, decay, in_float32


class Mamba(Mixer):
    def __init__(self, tensors: Tensors, config: ModelConfig, mamba: Mamba2, at: str) -> None:
        """`at` is the prefix of the layer's tensors. A rank has some heads, with their groups; the
        one group is on all ranks."""
        c, m, own, shard = config, mamba, at + mamba.at, tensors.shard
        self.before = layer_norm(tensors, c, at, c.norms.before_attention)
        self.after = layer_norm(tensors, c, at, c.norms.after_attention)
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
        self.width = self.sizes.inner
        self.widths = (self.width + self.sizes.inputs[1] + self.sizes.heads,)

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.inputs, self.output

    def project(
        self, kernels: Kernels, x: Operand, memory: Memory, place: Place, into: Made | None = None
    ) -> Projected:
        store = Store(None if into is None else into[0])
        return self.split([kernels.gemms.project(x, self.inputs, store).rows])

    def split(self, made: Made) -> Projected:
        (every,) = made
        sizes = [self.width, self.sizes.inputs[1], self.sizes.heads]
        gate, xbc, dt = torch.split(every, sizes, dim=1)
        return Projected((xbc, dt), gate)

    def run(
        self,
        kernels: Kernels,
        inputs: tuple[torch.Tensor, ...],
        memory: Memory,
        plan: Any,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert isinstance(memory, States)
        xbc, dt = inputs
        return kernels.recurrent.scan(xbc, dt, self.layer, memory, plan, out)

    def finish(
        self, kernels: Kernels, made: torch.Tensor, gate: torch.Tensor | None, then: Join
    ) -> Operand:
        assert gate is not None
        if self.across:
            gated = made.float() * silu(gate.float())
            norm_across(kernels, [(gated, self.norm)])
            gated = gated.to(made.dtype)
        else:
            gated = kernels.recurrent.gate_then_norm(made, gate, self.norm, self.layer.groups)
        return kernels.gemms.project(Operand(gated), self.output, then)
