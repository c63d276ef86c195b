"""The blocks of a decoder layer: attention and MLP, with their norms.

The attention call runs between the two halves of Attention. What it computes depends on which
sequence a row belongs to, so a captured graph breaks there: `project` ends a segment, `output`
begins the next one, which has all of the MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvline_server.kernels.attention import Heads, SlotMapping
from kvline_server.kernels.experts import Given
from kvline_server.kernels.interface import Kernels
from kvline_server.kernels.projection import Gate, Join, Norm, Operand, Projection, Store
from kvline_server.memory.arena import KVLayer
from kvline_server.model.config import ModelConfig
from kvline_server.model.linear import Output, Rows, Tensors, fused, projection
from kvline_server.model.shard import kv_heads, local


def norm(
    tensors: Tensors, config: ModelConfig, name: str, width: int, own: range | None = None
) -> Norm:
    """Of `width` elements, of which this rank has its `own` if given. An offset of the weights is
    added once, at load. In bfloat16 1 + weight is off by then, by at most one part in 256, where a
    model's own code adds in float32."""
    parts = [Rows(f"{name}.weight", own or range(width), width)]
    return Norm(tensors.get(parts, offset=config.norms.offset), config.norm_eps)


def layer_norm(tensors: Tensors, config: ModelConfig, at: str, name: str | None) -> Norm | None:
    """One of a layer's norms over the hidden states; None where the model has none there."""
    return None if name is None else norm(tensors, config, at + name, config.hidden)


def norm_across(kernels: Kernels, vectors: Sequence[tuple[torch.Tensor, Norm]]) -> None:
    """In place: norms of vectors of which each rank has a part, all of one width; parts that
    several ranks have, all have as often. Each [rows, part]"""
    squares = torch.stack([x.float().square().mean(dim=-1) for x, _ in vectors], dim=1)
    means = kernels.group.all_reduce(squares).div_(kernels.group.ranks)
    for index, (x, own) in enumerate(vectors):
        scale = torch.rsqrt(means[:, index : index + 1] + own.eps)
        x.copy_(x.float().mul(scale).mul_(own.weight))


class Attention:
    def __init__(self, tensors: Tensors, config: ModelConfig, at: str, layer: int) -> None:
        """`at` is the prefix of the layer's tensors."""
        c, own, shard = config, at + "self_attn.", tensors.shard
        self.config = local(c, shard)  # of this rank
        self.before = layer_norm(tensors, c, at, c.norms.before_attention)
        self.after = layer_norm(tensors, c, at, c.norms.after_attention)
        widths = [n * c.head_dim for n in (c.heads, c.kv_heads)]
        heads = shard.of(c.heads), kv_heads(c, shard)
        rows = [range(n.start * c.head_dim, n.stop * c.head_dim) for n in heads]
        q, k = (_rotary_rows(some, c.head_dim, c.rope_of(layer).rotary_dim) for some in rows)
        outputs = [Output(q, widths[0]), Output(k, widths[1]), Output([rows[1]], widths[1])]
        self.qkv = projection(tensors, fused(own, c.qkv, outputs), c.hidden, c.qkv_bias)
        self.q_norm = self.k_norm = None
        if c.qk_norm == "head":
            self.q_norm, self.k_norm = (
                norm(tensors, c, own + name, c.head_dim) for name in ("q_norm", "k_norm")
            )
        elif c.qk_norm:
            self.q_norm = norm(tensors, c, own + "q_norm", widths[0], rows[0])
            self.k_norm = norm(tensors, c, own + "k_norm", widths[1], rows[1])
        output = [Rows(own + "o_proj", range(c.hidden), c.hidden)]
        self.output = projection(tensors, output, widths[0], c.output_bias, rows[0])
        self.sinks: torch.Tensor | None = None  # [heads], in float32 as the softmax is
        if c.sinks:
            self.sinks = tensors.get([Rows(own + "sinks", heads[0], c.heads)], dtype=torch.float32)

    def project(
        self,
        kernels: Kernels,
        x: Operand,
        rope: torch.Tensor,
        mapping: SlotMapping,
        kv: KVLayer,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Writes keys and values to the cache. x [rows, hidden] -> [rows, heads + 2 * kv_heads,
        dim], queries first, in `into` if given"""
        c = self.config
        store = Store(None if into is None else into.view(len(into), -1))
        flat = kernels.gemms.project(x, self.qkv, store).rows
        heads = flat.view(len(flat), -1, c.head_dim)
        made = Heads(heads, c.heads, c.kv_heads, None, None, c.norm_eps)
        if self.q_norm is not None and self.k_norm is not None:
            if c.qk_norm == "head":
                made = replace(made, q_norm=self.q_norm.weight, k_norm=self.k_norm.weight)
            else:
                q, k, _ = (part.view(len(part), -1) for part in made.split())
                if kernels.group.ranks > 1:
                    norm_across(kernels, [(q, self.q_norm), (k, self.k_norm)])
                else:
                    q.copy_(kernels.rows.rms_norm(q, self.q_norm))
                    k.copy_(kernels.rows.rms_norm(k, self.k_norm))
        kernels.attention.write(made, rope, mapping, kv)
        return heads


class MLP:
    def __init__(self, tensors: Tensors, config: ModelConfig, at: str) -> None:
        """`at` is the prefix of the layer's tensors."""
        c, own, columns = config, at + "mlp.", tensors.shard.of(config.intermediate)
        both = [Output([columns], c.intermediate)] * 2
        self.before = layer_norm(tensors, c, at, c.norms.before_mlp)
        self.after = layer_norm(tensors, c, at, c.norms.after_mlp)
        self.gate_up = projection(tensors, fused(own, c.gate_up, both), c.hidden, c.mlp_bias)
        down = [Rows(own + "down_proj", range(c.hidden), c.hidden)]
        self.down = projection(tensors, down, c.intermediate, c.mlp_bias, columns)
        self.activation = c.activation

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.gate_up, self.down

    def __call__(
        self, kernels: Kernels, x: Operand, residual: torch.Tensor, norm: Norm | None, given: Given
    ) -> Operand:
        """Joins its output to the residual, with the norm of what follows; as Experts, for which
        the `given` rows alone count."""
        gated = kernels.gemms.project(x, self.gate_up, Gate(self.activation))
        return kernels.gemms.project(gated, self.down, Join(residual, self.after, norm))


def _rotary_rows(rows: range, dim: int, rotary: int | None) -> list[range]:
    """The order of a projection's rows, those of some heads, with which a kernel that rotates whole
    heads by halves rotates the first `rotary` elements: their left half, half of the others, their
    right half, the rest. The same order of query and key leaves their dot product as it was; the
    angle of the others is 0 (rope.py)."""
    if rotary is None or rotary == dim:
        return [rows]
    half, middle = rotary // 2, (rotary + dim) // 2
    cuts = (range(half), range(rotary, middle), range(half, rotary), range(middle, dim))
    heads = range(rows.start, rows.stop, dim)
    return [range(at + c.start, at + c.stop) for at in heads for c in cuts]
