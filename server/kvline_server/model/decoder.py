"""The decoder: a model's blocks in the order of a step, cut at the attention calls.

`forward` returns hidden states and never runs the LM head; `compute_logits` runs it on the rows
that it is given.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from kvline_server.kernels.attention import SlotMapping
from kvline_server.kernels.experts import Given
from kvline_server.kernels.fp8 import Weight
from kvline_server.kernels.interface import Kernels
from kvline_server.kernels.layout import Layout
from kvline_server.kernels.projection import Join, Norm, Operand
from kvline_server.kernels.routing import Played
from kvline_server.memory.arena import KVLayer, KVShape, Scales
from kvline_server.model.config import ModelConfig
from kvline_server.model.experts import Experts
from kvline_server.model.loader import Weights
from kvline_server.model.rope import cos_sin


@dataclass(frozen=True, slots=True)
class LayerState:
    """A layer's state before attention: the residual stream and the QKV heads."""

    residual: torch.Tensor  # [rows, hidden]
    heads: torch.Tensor  # [rows, heads + 2 * kv_heads, dim], queries first


def kv_shape(config: ModelConfig, dtype: torch.dtype, scales: tuple[Scales, ...] = ()) -> KVShape:
    return KVShape(config.layers, config.kv_heads, config.head_dim, dtype, scales)


class Decoder:
    def __init__(
        self, config: ModelConfig, weights: Weights, positions: int, kernels: Kernels
    ) -> None:
        """`config` is the rank's (shard.local)."""
        self.config = config
        self.weights = weights
        self.kernels = kernels
        scale = torch.tensor(config.embedding_scale, dtype=kernels.dtype)
        self.embedding_scale = float(scale)  # rounded, as in training
        ropes = [config.rope_of(index) for index in range(config.layers)]
        tables = {
            rope: kernels.attention.rope_table(*cos_sin(rope, config.head_dim, positions))
            for rope in set(ropes)
        }
        self.ropes = [tables[rope] for rope in ropes]  # of each layer

    def step(
        self,
        token_ids: torch.Tensor,
        mapping: SlotMapping,
        cache: list[KVLayer],
        layout: Layout,
        wanted: torch.Tensor,
        played: Played = Played.NOTHING,
    ) -> torch.Tensor:
        """Plans and runs `forward`, padded to a row count of the kernels. Padding rows write to the
        dummy page, and no expert gets them. token_ids [rows], wanted [n] -> [n, hidden]"""
        rows = self.kernels.gemms.padded(len(token_ids))
        padded = SlotMapping(_pad(mapping.positions, rows), _pad(mapping.slots, rows))
        plan = self.kernels.attention.plan(layout)
        given = Given(len(token_ids), played)
        return self.forward(_pad(token_ids, rows), padded, cache, plan, wanted, given)

    def forward(
        self,
        token_ids: torch.Tensor,
        mapping: SlotMapping,
        cache: list[KVLayer],
        plan: Any,
        wanted: torch.Tensor,
        given: Given | None = None,
    ) -> torch.Tensor:
        """Hidden states after the last norm, for the wanted rows only: after the last attention,
        rows no longer depend on each other. Rows that are not `given` are padding; where
        that is on the device, all are wanted in their order.
        token_ids [rows], wanted [n] -> [n, hidden]

        The code between two attention calls is one graph segment (worker/graphs/segments.py)."""
        given = given or Given(len(token_ids))
        state = self.start(token_ids, mapping, cache[0])
        for index, kv in enumerate(cache):
            queries = state.heads[:, : self.config.heads]
            attended = self.attend(index, queries, kv, plan)
            if index + 1 < len(cache):
                next = cache[index + 1]
                state = self.between(index, attended, state, mapping, next, given)
        rows = _pad(wanted, self.kernels.gemms.padded(len(wanted)))
        last = given if given.on_device is not None else replace(given, rows=len(wanted))
        made = self.finish(attended[rows], state.residual[rows], last)
        return made[: len(wanted)]

    def warm_up(self, rows: int, cache: list[KVLayer]) -> None:
        """Runs every GEMM shape of a step once at this row count, in the first layers alone."""
        device = self.kernels.device
        given = Given(rows)
        nothing = torch.zeros(rows, dtype=torch.int64, device=device)
        mapping = SlotMapping(nothing, nothing)
        state = self.start(nothing, mapping, cache[0])
        attended = state.residual.new_zeros((rows, self.config.heads * self.config.head_dim))
        if len(cache) > 1:
            state = self.between(0, attended, state, mapping, cache[1], given)
        self.finish(attended, state.residual, given)

    def start(
        self,
        token_ids: torch.Tensor,
        mapping: SlotMapping,
        kv: KVLayer,
        into: torch.Tensor | None = None,
    ) -> LayerState:
        """From token ids to the first layer's queries, with keys and values in the cache; the heads
        are written to `into` if given."""
        attention = self.weights.layers[0].attention
        residual = self.weights.embedding[token_ids]
        if self.embedding_scale != 1.0:
            residual *= self.embedding_scale
        before = attention.before
        x = residual if before is None else self.kernels.rows.rms_norm(residual, before)
        heads = attention.project(self.kernels, Operand(x), self.ropes[0], mapping, kv, into)
        return LayerState(residual, heads)

    def attend(
        self,
        index: int,
        queries: torch.Tensor,
        kv: KVLayer,
        plan: Any,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Layer `index`'s attention. queries [rows, heads, dim] -> [rows, heads * dim]"""
        options = self.weights.layers[index].attention.options
        return self.kernels.attention.attend(queries, kv, plan, out, options)

    def between(
        self,
        index: int,
        attended: torch.Tensor,
        state: LayerState,
        mapping: SlotMapping,
        kv: KVLayer,
        given: Given,
        into: torch.Tensor | None = None,
    ) -> LayerState:
        """From the attention of layer `index` to the queries of the next layer. Overwrites the
        residual: a captured segment finds it where it was."""
        attention, rope = self.weights.layers[index + 1].attention, self.ropes[index + 1]
        x = self._after(index, attended, state.residual, attention.before, given)
        heads = attention.project(self.kernels, x, rope, mapping, kv, into)
        return LayerState(state.residual, heads)

    def finish(self, attended: torch.Tensor, residual: torch.Tensor, given: Given) -> torch.Tensor:
        """From the last layer's attention to hidden states."""
        last = len(self.weights.layers) - 1
        x = self._after(last, attended, residual, self.weights.norm, given)
        return self.kernels.gemms.settle(x)

    def _after(
        self,
        index: int,
        attended: torch.Tensor,
        residual: torch.Tensor,
        norm: Norm | None,
        given: Given,
    ) -> Operand:
        """From a layer's attention to the input of what follows the layer, whose norm is given."""
        layer, kernels = self.weights.layers[index], self.kernels
        attention, mlp = layer.attention, layer.mlp
        then = Join(residual, attention.after, mlp.before)
        x = kernels.gemms.project(Operand(attended), attention.output, then)
        return mlp(kernels, x, residual, norm, given)

    def gemm_weights(self) -> list[list[Weight]]:
        """One list per GEMM of a layer, with its weight of each layer."""
        layers = self.weights.layers
        every = [(a.attention.qkv, a.attention.output, *a.mlp.projections) for a in layers]
        return [[one.weight for one in kind] for kind in zip(*every, strict=True)]

    def experts(self) -> list[Experts]:
        """Each layer's mixture; none of a dense model."""
        return [each.mlp for each in self.weights.layers if isinstance(each.mlp, Experts)]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the rows given, of this rank's tokens. [rows, hidden] -> [rows, tokens]"""
        return self.kernels.gemms.logits(hidden, self.weights.head)


def _pad(values: torch.Tensor, rows: int) -> torch.Tensor:
    """Pads with zeros at the end. [n] -> [rows]"""
    missing = rows - len(values)
    return torch.cat((values, values.new_zeros(missing))) if missing else values
