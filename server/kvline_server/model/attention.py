"""Attention, with norms of queries and keys and a gate of its output where a model has them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from kvline_server.kernels.attention import Heads
from kvline_server.kernels.interface import Kernels
from kvline_server.kernels.projection import Join, Operand, Projection, Store
from kvline_server.memory.arena import KVLayer
from kvline_server.memory.groups import Memory
from kvline_server.model.blocks import layer_norm, norm, norm_across
from kvline_server.model.config import ModelConfig
from kvline_server.model.linear import Output, Rows, Tensors, fused, projection
from kvline_server.model.mixer import Made, Mixer, Place, Projected
from kvline_server.model.shard import kv_heads, local


class Attention(Mixer):
    def __init__(self, tensors: Tensors, config: ModelConfig, at: str) -> None:
        """`at` is the prefix of the layer's tensors."""
        c, own, shard = config, at + config.names.attention, tensors.shard
        self.config = local(c, shard)  # of this rank
        self.before = layer_norm(tensors, c, at, c.norms.before_attention)
        self.after = layer_norm(tensors, c, at, c.norms.after_attention)
        widths = [n * c.head_dim for n in (c.heads, c.kv_heads)]
        heads, keys = shard.of(c.heads), kv_heads(c, shard)
        rows = [range(n.start * c.head_dim, n.stop * c.head_dim) for n in (heads, keys)]
        parts = _inputs(own, c, heads, keys)
        self.qkv = projection(tensors, parts, c.hidden, c.qkv_bias)
        self.q_norm = self.k_norm = None
        if c.qk_norm == "head":
            self.q_norm, self.k_norm = (
                norm(tensors, c, own + name, c.head_dim) for name in ("q_norm", "k_norm")
            )
        elif c.qk_norm:
            self.q_norm = norm(tensors, c, own + "q_norm", widths[0], rows[:1])
            self.k_norm = norm(tensors, c, own + "k_norm", widths[1], rows[1:])
        output = [Rows(own + "o_proj", range(c.hidden), c.hidden)]
        self.output = projection(tensors, output, widths[0], c.output_bias, rows[0])
        self.sinks: torch.Tensor | None = None  # [heads], in float32 as the softmax is
        if c.sinks:
            self.sinks = tensors.get([Rows(own + "sinks", heads, c.heads)], dtype=torch.float32)
        self.width = len(rows[0])
        self.widths = (sum(len(part.rows) for part in parts),)

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.qkv, self.output

    def project(
        self, kernels: Kernels, x: Operand, memory: Memory, place: Place, into: Made | None = None
    ) -> Projected:
        """Writes keys and values to the cache."""
        assert isinstance(memory, KVLayer)
        c = self.config
        store = Store(None if into is None else into[0])
        flat = kernels.gemms.project(x, self.qkv, store).rows
        heads = flat.view(len(flat), -1, c.head_dim)[:, : c.heads + 2 * c.kv_heads]
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
        kernels.attention.write(made, place.rope, place.mapping, memory)
        return self.split((flat,))

    def split(self, made: Made) -> Projected:
        """Queries [rows, heads, dim], and a gate like them."""
        (flat,), c = made, self.config
        heads = flat.view(len(flat), -1, c.head_dim)
        gate = heads[:, c.heads + 2 * c.kv_heads :] if c.output_gate else None
        return Projected((heads[:, : c.heads],), gate)

    def run(
        self,
        kernels: Kernels,
        inputs: tuple[torch.Tensor, ...],
        memory: Memory,
        plan: Any,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert isinstance(memory, KVLayer)
        (queries,), scale = inputs, self.config.softmax_scale
        return kernels.attention.attend(queries, memory, plan, out, scale, self.sinks)

    def finish(
        self, kernels: Kernels, made: torch.Tensor, gate: torch.Tensor | None, then: Join
    ) -> Operand:
        if gate is not None:
            made = made.view(gate.shape).mul(gate.sigmoid()).flatten(1)
        return kernels.gemms.project(Operand(made), self.output, then)


def _inputs(own: str, c: ModelConfig, heads: range, keys: range) -> list[Rows]:
    """Queries, keys and values of a rank's heads; then the gate, of which each head's rows follow
    its queries in their tensor."""
    dim, of = c.head_dim, c.head_dim * c.kv_heads
    some = [range(keys.start * dim, keys.stop * dim)]
    if not c.output_gate:
        queries = [range(heads.start * dim, heads.stop * dim)]
        outputs = [Output(queries, dim * c.heads), Output(some, of), Output(some, of)]
        return fused(own, c.qkv, outputs)
    wide, starts = 2 * dim * c.heads, [2 * dim * head for head in heads]
    queries, gate = ([range(at + half, at + half + dim) for at in starts] for half in (0, dim))
    parts = fused(own, c.qkv, [Output(queries, wide), Output(some, of), Output(some, of)])
    return parts + [Rows(own + c.qkv[0], rows, wide) for rows in gate]
