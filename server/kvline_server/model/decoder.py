"""The decoder of Llama, Mistral, Qwen2 and Qwen3, which differ by flags of ModelConfig.

`forward` returns hidden states and never runs the LM head; `compute_logits` runs it on the rows
that it is given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from kvline_server.kernels.interface import Heads, Kernels, SlotMapping
from kvline_server.kernels.layout import Layout
from kvline_server.memory.arena import KVLayer, KVShape
from kvline_server.model.config import ModelConfig
from kvline_server.model.loader import LayerWeights, Weights


@dataclass(frozen=True, slots=True)
class State:
    """A layer's state before attention: the residual stream and the QKV heads."""

    residual: torch.Tensor  # [rows, hidden]
    heads: torch.Tensor  # [rows, heads + 2 * kv_heads, dim], queries first


def kv_shape(config: ModelConfig, dtype: torch.dtype) -> KVShape:
    return KVShape(config.layers, config.kv_heads, config.head_dim, dtype)


class Decoder:
    def __init__(
        self, config: ModelConfig, weights: Weights, positions: int, kernels: Kernels
    ) -> None:
        self.config = config
        self.weights = weights
        self.kernels = kernels
        self.rope = kernels.rope_table(inverse_frequencies(config), positions)

    def step(
        self,
        token_ids: torch.Tensor,
        mapping: SlotMapping,
        cache: list[KVLayer],
        layout: Layout,
        wanted: torch.Tensor,
    ) -> torch.Tensor:
        """Plans and runs `forward`, padded to a row count of the kernels. Padding rows write to the
        dummy page. token_ids [rows], wanted [n] -> [n, hidden]"""
        rows = self.kernels.padded(len(token_ids))
        padded = SlotMapping(_pad(mapping.positions, rows), _pad(mapping.slots, rows))
        plan = self.kernels.plan(layout)
        return self.forward(_pad(token_ids, rows), padded, cache, plan, wanted)

    def forward(
        self,
        token_ids: torch.Tensor,
        mapping: SlotMapping,
        cache: list[KVLayer],
        plan: Any,
        wanted: torch.Tensor,
    ) -> torch.Tensor:
        """Hidden states after the last norm, for the wanted rows only: after the last attention,
        rows no longer depend on each other. token_ids [rows], wanted [n] -> [n, hidden]

        The code between two attention calls is one graph segment (worker/graphs.py)."""
        state = self.start(token_ids, mapping, cache[0])
        for index, kv in enumerate(cache):
            queries = state.heads[:, : self.config.heads]
            attended = self.attend(index, queries, kv, plan)
            if index + 1 < len(cache):
                state = self.between(index, attended, state, mapping, cache[index + 1])
        rows = _pad(wanted, self.kernels.padded(len(wanted)))
        return self.finish(attended[rows], state.residual[rows])[: len(wanted)]

    def warm_up(self, rows: int, cache: list[KVLayer]) -> None:
        """Runs every GEMM shape of a step once at this row count, in the first layers alone."""
        device = self.kernels.device
        nothing = torch.zeros(rows, dtype=torch.int64, device=device)
        mapping = SlotMapping(nothing, nothing)
        state = self.start(nothing, mapping, cache[0])
        attended = state.residual.new_zeros((rows, self.config.heads * self.config.head_dim))
        if len(cache) > 1:
            state = self.between(0, attended, state, mapping, cache[1])
        self.finish(attended, state.residual)

    def start(
        self,
        token_ids: torch.Tensor,
        mapping: SlotMapping,
        kv: KVLayer,
        into: torch.Tensor | None = None,
    ) -> State:
        """From token ids to the first layer's queries, with keys and values in the cache; the heads
        are written to `into` if given."""
        layer = self.weights.layers[0]
        residual = self.weights.embedding[token_ids]
        normed = self.kernels.rms_norm(residual, layer.input_norm, self.config.norm_eps)
        return State(residual, self._heads(layer, normed, mapping, kv, into))

    def attend(
        self,
        index: int,
        queries: torch.Tensor,
        kv: KVLayer,
        plan: Any,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Layer `index`'s attention. queries [rows, heads, dim] -> [rows, heads * dim]"""
        return self.kernels.attend(queries, kv, plan, out)

    def between(
        self,
        index: int,
        attended: torch.Tensor,
        state: State,
        mapping: SlotMapping,
        kv: KVLayer,
        into: torch.Tensor | None = None,
    ) -> State:
        """From the attention of layer `index` to the queries of the next layer."""
        following = self.weights.layers[index + 1]
        normed, residual = self._after(index, attended, state.residual, following.input_norm)
        return State(residual, self._heads(following, normed, mapping, kv, into))

    def finish(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """From the last layer's attention to hidden states."""
        return self._after(len(self.weights.layers) - 1, attended, residual, self.weights.norm)[0]

    def _after(
        self, index: int, attended: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer, kernels, eps = self.weights.layers[index], self.kernels, self.config.norm_eps
        out = kernels.linear(attended, layer.output, layer.output_bias)
        normed, residual = kernels.add_norm(out, residual, layer.post_norm, eps)
        up = kernels.silu_and_mul(kernels.linear(normed, layer.gate_up, layer.gate_up_bias))
        down = kernels.linear(up, layer.down, layer.down_bias)
        return kernels.add_norm(down, residual, norm, eps)

    def _heads(
        self,
        layer: LayerWeights,
        normed: torch.Tensor,
        mapping: SlotMapping,
        kv: KVLayer,
        into: torch.Tensor | None,
    ) -> torch.Tensor:
        c = self.config
        flat = None if into is None else into.view(len(into), -1)
        fused = self.kernels.linear(normed, layer.qkv, layer.qkv_bias, flat)
        heads = fused.view(len(fused), -1, c.head_dim)
        made = Heads(heads, c.heads, c.kv_heads, layer.q_norm, layer.k_norm, c.norm_eps)
        self.kernels.write(made, self.rope, mapping, kv)
        return heads

    def gemm_weights(self) -> list[list[torch.Tensor]]:
        """One list per kind of GEMM, with its weight of each layer."""
        layers = self.weights.layers
        kinds = ("qkv", "output", "gate_up", "down")
        return [[getattr(layer, kind) for layer in layers] for kind in kinds]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the rows given. [rows, hidden] -> [rows, vocabulary]"""
        return self.kernels.logits(hidden, self.weights.head)


def _pad(values: torch.Tensor, rows: int) -> torch.Tensor:
    """Pads with zeros at the end. [n] -> [rows]"""
    missing = rows - len(values)
    return torch.cat((values, values.new_zeros(missing))) if missing else values


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Rotary frequencies, with Llama 3's scaling where configured. float32 [dim / 2]"""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    base = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if scaling is None:
        return base
    wavelengths = 2 * math.pi / base
    low = scaling.original_max_position / scaling.low_freq_factor
    high = scaling.original_max_position / scaling.high_freq_factor
    smooth = (scaling.original_max_position / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    mixed = (1 - smooth) * base / scaling.factor + smooth * base
    scaled = torch.where(wavelengths > low, base / scaling.factor, base)
    return torch.where((wavelengths <= low) & (wavelengths >= high), mixed, scaled)
