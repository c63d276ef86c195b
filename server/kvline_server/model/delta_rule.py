"""The gated delta rule as a mixer, in the place of attention."""

from __future__ import annotations

from typing import Any

import torch

from kvline_server.kernels import recurrent as kernel
from kvline_server.kernels.interface import Kernels
from kvline_server.kernels.projection import Join, Norm, Operand, Projection, Store
from kvline_server.kernels.recurrent import States
from kvline_server.memory.groups import Memory
from kvline_server.model import hybrid
from kvline_server.model.blocks import layer_norm
from kvline_server.model.config import ModelConfig
from kvline_server.model.linear import Output, Rows, Tensors, fused, projection
from kvline_server.model.mixer import Made, Mixer, Place, Projected
from kvline_server.model.recurrent_weights import convolution, decay


class DeltaRule(Mixer):
    def __init__(
        self, tensors: Tensors, config: ModelConfig, rule: hybrid.DeltaRule, at: str
    ) -> None:
        """`at` is the prefix of the layer's tensors. A rank has some key heads with all value heads
        that read them."""
        c, own, shard = config, at + "linear_attn.", tensors.shard
        self.before = layer_norm(tensors, c, at, c.norms.before_attention)
        self.after = layer_norm(tensors, c, at, c.norms.after_attention)
        self.sizes = rule.share(shard.ranks)  # of this rank
        heads = shard.of(rule.value_heads)
        keys, values = shard.of(rule.keys), shard.of(rule.values)
        qkvz, ba = (_by_key_head if rule.by_key_head else _by_kind)(tensors, rule, own)
        # Apart: files in fp8 have b and a as they were, and one GEMM has one format.
        self.qkvz = projection(tensors, qkvz, c.hidden)
        self.ba = projection(tensors, ba, c.hidden)
        outputs = [Output([keys], rule.keys)] * 2 + [Output([values], rule.values)]
        channels = [part.rows for part in fused("", ("",), outputs)]
        every = 2 * rule.keys + rule.values
        self.layer = kernel.DeltaRule(
            key_heads=self.sizes.key_heads,
            value_heads=self.sizes.value_heads,
            key_dim=rule.key_dim,
            value_dim=rule.value_dim,
            convolution=convolution(tensors, own, channels, every, rule.width),
            decay=decay(tensors, own, heads, rule.value_heads),
        )
        # Times its weight, also where the model's other norms multiply by 1 more than theirs.
        weight = [Rows(own + "norm.weight", range(rule.value_dim), rule.value_dim)]
        self.norm, self.gate = Norm(tensors.get(weight), c.norm_eps), rule.gate
        output = [Rows(own + "out_proj", range(c.hidden), c.hidden)]
        self.output = projection(tensors, output, rule.values, own=values)
        self.width = self.sizes.values
        self.widths = (self.sizes.inputs[1] + self.width, 2 * self.sizes.value_heads)

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.qkvz, self.ba, self.output

    def project(
        self, kernels: Kernels, x: Operand, memory: Memory, place: Place, into: Made | None = None
    ) -> Projected:
        settled = Operand(kernels.gemms.settle(x))
        stores = [Store(each) for each in into or (None, None)]
        both = zip((self.qkvz, self.ba), stores, strict=True)
        return self.split([kernels.gemms.project(settled, *each).rows for each in both])

    def split(self, made: Made) -> Projected:
        """Queries, keys and values of all heads, then b and a; the gate is strided as they are."""
        qkvz, ba = made
        qkv, gate = torch.split(qkvz, [self.sizes.inputs[1], self.width], dim=1)
        return Projected((qkv, ba), gate)

    def run(
        self,
        kernels: Kernels,
        inputs: tuple[torch.Tensor, ...],
        memory: Memory,
        plan: Any,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert isinstance(memory, States)
        qkv, ba = inputs
        return kernels.recurrent.delta_rule(qkv, ba, self.layer, memory, plan, out)

    def finish(
        self, kernels: Kernels, made: torch.Tensor, gate: torch.Tensor | None, then: Join
    ) -> Operand:
        assert gate is not None
        gated = kernels.recurrent.norm_then_gate(made, gate, self.norm, self.gate)
        return kernels.gemms.project(Operand(gated), self.output, then)


def _by_kind(tensors: Tensors, rule: hybrid.DeltaRule, own: str) -> tuple[list[Rows], list[Rows]]:
    """Parts of q, k, v and z, and of b and a, of a rank."""
    shard, heads = tensors.shard, rule.value_heads
    keys, values = Output([shard.of(rule.keys)], rule.keys), [shard.of(rule.values)]
    qkv = fused(own, ("in_proj_qkv",), [keys, keys, Output(values, rule.values)])
    z = Rows(own + "in_proj_z", values[0], rule.values)
    b, a = (Rows(own + name, shard.of(heads), heads) for name in ("in_proj_b", "in_proj_a"))
    return [*qkv, z], [b, a]


def _by_key_head(
    tensors: Tensors, rule: hybrid.DeltaRule, own: str
) -> tuple[list[Rows], list[Rows]]:
    """As _by_kind, of files that have all rows of a key head together."""
    each = rule.value_heads // rule.key_heads
    wide = each * rule.value_dim

    def parts(name: str, sizes: tuple[int, ...]) -> list[Rows]:
        """All key heads' rows of the first size, then of the second."""
        block, starts = sum(sizes), [sum(sizes[:i]) for i in range(len(sizes))]
        return [
            Rows(own + name, range(at, at + size), rule.key_heads * block)
            for start, size in zip(starts, sizes, strict=True)
            for head in tensors.shard.of(rule.key_heads)
            for at in (head * block + start,)
        ]

    qkvz = parts("in_proj_qkvz", (rule.key_dim, rule.key_dim, wide, wide))
    return qkvz, parts("in_proj_ba", (each, each))
