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
from kvline_server.memory.groups import CacheGroup, order
from kvline_server.model.config import ModelConfig
from kvline_server.model.experts import Experts
from kvline_server.model.loader import Weights
from kvline_server.model.rope import cos_sin

Mappings = list[SlotMapping]  # of each group of layers that share pages


@dataclass(frozen=True, slots=True)
class LayerState:
    """A layer's state before attention: the residual stream and the QKV heads."""

    residual: torch.Tensor  # [rows, hidden]
    heads: torch.Tensor  # [rows, heads + 2 * kv_heads, dim], queries first


def cache_groups(
    config: ModelConfig, longest: int, dtype: torch.dtype, scales: tuple[Scales, ...] = ()
) -> tuple[CacheGroup, ...]:
    """Of a rank's `config`, for sequences of up to `longest` tokens; `scales` of each layer."""
    heads = config.kv_heads, config.head_dim, dtype
    return tuple(
        CacheGroup(
            window, layers, KVShape(len(layers), *heads, tuple(scales[i] for i in layers if scales))
        )
        for window, layers in order(config.every_window, longest).items()
    )


class Decoder:
    def __init__(
        self, config: ModelConfig, weights: Weights, positions: int, kernels: Kernels
    ) -> None:
        """`config` is the rank's (shard.local); sequences have up to `positions` tokens."""
        self.config = config
        groups = order(config.every_window, positions)
        self.windows = tuple(groups)  # of each group of layers
        self.group_of = {layer: at for at, own in enumerate(groups.values()) for layer in own}
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
        mappings: Mappings,
        cache: list[KVLayer],
        layout: Layout,
        logits_indices: torch.Tensor,
        played: Played = Played.NOTHING,
    ) -> torch.Tensor:
        """Plans and runs `forward`, padded to a row count of the kernels. Padding rows write to the
        dummy page, and no expert gets them. token_ids [rows], logits_indices [n] -> [n, hidden]"""
        rows = self.kernels.gemms.padded(len(token_ids))
        positions = _pad(mappings[0].positions, rows)
        padded = [SlotMapping(positions, _pad(each.slots, rows)) for each in mappings]
        given = Given(len(token_ids), played)
        plans = self.plan(layout)
        return self.forward(_pad(token_ids, rows), padded, cache, plans, logits_indices, given)

    def plan(self, layout: Layout) -> list[Any]:
        """Attention of a step, for each group."""
        return [
            self.kernels.attention.plan(layout, group, window)
            for group, window in enumerate(self.windows)
        ]

    def forward(
        self,
        token_ids: torch.Tensor,
        mappings: Mappings,
        cache: list[KVLayer],
        plans: list[Any],
        logits_indices: torch.Tensor,
        given: Given | None = None,
    ) -> torch.Tensor:
        """Hidden states after the last norm, for the LM head's rows only: after the last attention,
        rows no longer depend on each other. Rows that are not `given` are padding; where
        that is on the device, logits_indices are all of them, in order.
        token_ids [rows], logits_indices [n] -> [n, hidden]

        The code between two attention calls is one graph segment (worker/graphs/segments.py)."""
        given = given or Given(len(token_ids))
        state = self.start(token_ids, mappings, cache[0])
        for index, kv in enumerate(cache):
            queries = state.heads[:, : self.config.heads]
            attended = self.attend(index, queries, kv, plans)
            if index + 1 < len(cache):
                next = cache[index + 1]
                state = self.between(index, attended, state, mappings, next, given)
        rows = _pad(logits_indices, self.kernels.gemms.padded(len(logits_indices)))
        last = given if given.on_device is not None else replace(given, rows=len(logits_indices))
        made = self.finish(attended[rows], state.residual[rows], last)
        return made[: len(logits_indices)]

    def warm_up(self, rows: int, cache: list[KVLayer]) -> None:
        """Runs every GEMM shape of a step once at this row count, in the first layers alone."""
        device = self.kernels.device
        given = Given(rows)
        nothing = torch.zeros(rows, dtype=torch.int64, device=device)
        mappings = [SlotMapping(nothing, nothing)] * len(self.windows)
        state = self.start(nothing, mappings, cache[0])
        attended = state.residual.new_zeros((rows, self.config.heads * self.config.head_dim))
        if len(cache) > 1:
            state = self.between(0, attended, state, mappings, cache[1], given)
        self.finish(attended, state.residual, given)

    def start(
        self,
        token_ids: torch.Tensor,
        mappings: Mappings,
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
        mapping = mappings[self.group_of[0]]
        heads = attention.project(self.kernels, Operand(x), self.ropes[0], mapping, kv, into)
        return LayerState(residual, heads)

    def attend(
        self,
        index: int,
        queries: torch.Tensor,
        kv: KVLayer,
        plans: list[Any],
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Layer `index`'s attention. queries [rows, heads, dim] -> [rows, heads * dim]"""
        plan, scale = plans[self.group_of[index]], self.config.softmax_scale
        sinks = self.weights.layers[index].attention.sinks
        return self.kernels.attention.attend(queries, kv, plan, out, scale, sinks)

    def between(
        self,
        index: int,
        attended: torch.Tensor,
        state: LayerState,
        mappings: Mappings,
        kv: KVLayer,
        given: Given,
        into: torch.Tensor | None = None,
    ) -> LayerState:
        """From the attention of layer `index` to the queries of the next layer. Overwrites the
        residual: a captured segment finds it where it was."""
        attention, rope = self.weights.layers[index + 1].attention, self.ropes[index + 1]
        x = self._after(index, attended, state.residual, attention.before, given)
        mapping = mappings[self.group_of[index + 1]]
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
        return self.weights.experts()

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the rows given, of this rank's tokens. [rows, hidden] -> [rows, tokens]"""
        return self.kernels.gemms.logits(hidden, self.weights.head)


def _pad(values: torch.Tensor, rows: int) -> torch.Tensor:
    """Pads with zeros at the end. [n] -> [rows]"""
    missing = rows - len(values)
    return torch.cat((values, values.new_zeros(missing))) if missing else values
