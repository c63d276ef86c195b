"""The gated delta rule as a block, in the place of attention.

The rule runs between the two halves of the block, as an attention call does between those of
Attention: `project` ends a segment of a captured graph, `finish` begins the next one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvline_server.kernels import recurrent as kernel
from kvline_server.kernels.interface import Kernels
from kvline_server.kernels.projection import Join, Norm, Operand, Projection
from kvline_server.kernels.recurrent import Recurrent, States
from kvline_server.model import hybrid
from kvline_server.model.blocks import layer_norm
from kvline_server.model.config import ModelConfig
from kvline_server.model.linear import Output, Rows, Tensors, fused, projection
from kvline_server.model.recurrent_weights import convolution, decay


@dataclass(frozen=True, slots=True)
class Projected:
    """Of one layer, between the halves of its block."""

    qkv: torch.Tensor  # [rows, queries, keys and values of all heads]
    gate: torch.Tensor  # [rows, value_heads * value_dim], strided as qkv is
    ba: torch.Tensor  # [rows, 2 * value_heads]


class DeltaRule:
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

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.qkvz, self.ba, self.output

    def project(self, kernels: Kernels, x: Operand) -> Projected:
        """x [rows, hidden]"""
        settled = Operand(kernels.gemms.settle(x))
        both = kernels.gemms.project(settled, self.qkvz).rows
        qkv, gate = torch.split(both, [self.sizes.inputs[1], self.sizes.values], dim=1)
        return Projected(qkv, gate, kernels.gemms.project(settled, self.ba).rows)

    def run(
        self,
        recurrent: Recurrent,
        projected: Projected,
        states: States,
        plan: Any,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The rule, which updates the states. -> [rows, value_heads * value_dim]"""
        return recurrent.delta_rule(projected.qkv, projected.ba, self.layer, states, plan, out)

    def finish(
        self,
        kernels: Kernels,
        recurrent: Recurrent,
        made: torch.Tensor,
        projected: Projected,
        then: Join,
    ) -> Operand:
        """From the rule to the residual, with the norm of what follows. `made` is what run gave."""
        gated = recurrent.norm_then_gate(made, projected.gate, self.norm, self.gate)
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
