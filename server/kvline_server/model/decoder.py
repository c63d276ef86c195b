"""The decoder that Llama, Mistral, Qwen2 and Qwen3 share; they differ by flags of ModelConfig.

`forward` gives hidden states and never touches the LM head; `compute_logits` is another function
that sees only the rows somebody asked for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from kvline_server.kernels.interface import Heads, Kernels, KVLayer, Where
from kvline_server.kernels.layout import Layout
from kvline_server.model.config import ModelConfig
from kvline_server.model.loader import LayerWeights, Weights


@dataclass(frozen=True, slots=True)
class State:
    """What goes around attention: the residual stream, and the queries that attend."""

    residual: torch.Tensor  # [rows, hidden]
    heads: torch.Tensor  # [rows, heads + 2 * kv_heads, dim], queries first


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
        where: Where,
        cache: list[KVLayer],
        layout: Layout,
        wanted: torch.Tensor,
    ) -> torch.Tensor:
        """Plans and runs forward, padded to a row count that the kernels like. Pads write to the
        dummy page."""
        rows = self.kernels.padded(len(token_ids))
        padded = Where(_pad(where.positions, rows), _pad(where.slots, rows))
        plan = self.kernels.plan(layout)
        return self.forward(_pad(token_ids, rows), padded, cache, plan, wanted)

    def forward(
        self,
        token_ids: torch.Tensor,
        where: Where,
        cache: list[KVLayer],
        plan: Any,
        wanted: torch.Tensor,
    ) -> torch.Tensor:
        """Hidden states after the last norm, of the rows that somebody wants: behind the last
        attention a row serves nobody else. token_ids [rows], wanted [n] -> [n, hidden]

        Attention alone depends on whose the rows are; between two of them is one graph segment."""
        state = self.start(token_ids, where, cache[0])
        for index, kv in enumerate(cache):
            queries = state.heads[:, : self.config.heads]
            attended = self.kernels.attend(queries, kv, plan)
            if index + 1 < len(cache):
                state = self.between(index, attended, state, where, cache[index + 1])
        few = _pad(wanted, self.kernels.padded(len(wanted)))
        return self.finish(attended[few], state.residual[few])[: len(wanted)]

    def warm_up(self, rows: int, cache: list[KVLayer]) -> None:
        """Every GEMM of a step at one row count, in the first layers alone."""
        device = self.kernels.device
        nothing = torch.zeros(rows, dtype=torch.int64, device=device)
        where = Where(nothing, nothing)
        state = self.start(nothing, where, cache[0])
        attended = state.residual.new_zeros((rows, self.config.heads * self.config.head_dim))
        if len(cache) > 1:
            state = self.between(0, attended, state, where, cache[1])
        self.finish(attended, state.residual)

    def start(
        self,
        token_ids: torch.Tensor,
        where: Where,
        kv: KVLayer,
        into: torch.Tensor | None = None,
    ) -> State:
        """From tokens to the first layer's queries, its keys and values in the cache; the heads in
        `into` where it is given."""
        layer = self.weights.layers[0]
        residual = self.weights.embedding[token_ids]
        normed = self.kernels.rms_norm(residual, layer.input_norm, self.config.norm_eps)
        return State(residual, self._heads(layer, normed, where, kv, into))

    def between(
        self,
        index: int,
        attended: torch.Tensor,
        state: State,
        where: Where,
        kv: KVLayer,
        into: torch.Tensor | None = None,
    ) -> State:
        """From one layer's attention to the next layer's queries."""
        following = self.weights.layers[index + 1]
        normed, residual = self._after(index, attended, state.residual, following.input_norm)
        return State(residual, self._heads(following, normed, where, kv, into))

    def finish(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """From the last layer's attention to hidden states, of any rows."""
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
        where: Where,
        kv: KVLayer,
        into: torch.Tensor | None,
    ) -> torch.Tensor:
        c = self.config
        flat = None if into is None else into.view(len(into), -1)
        fused = self.kernels.linear(normed, layer.qkv, layer.qkv_bias, flat)
        heads = fused.view(len(fused), -1, c.head_dim)
        made = Heads(heads, c.heads, c.kv_heads, layer.q_norm, layer.k_norm, c.norm_eps)
        self.kernels.write(made, self.rope, where, kv)
        return heads

    def gemm_weights(self) -> list[list[torch.Tensor]]:
        """The weights of each kind of GEMM, layer by layer."""
        layers = self.weights.layers
        kinds = ("qkv", "output", "gate_up", "down")
        return [[getattr(layer, kind) for layer in layers] for kind in kinds]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the rows given. [rows, hidden] -> [rows, vocabulary]"""
        return self.kernels.logits(hidden, self.weights.head)


def _pad(values: torch.Tensor, rows: int) -> torch.Tensor:
    """Zeros at the end, up to so many rows. [n] -> [rows]"""
    missing = rows - len(values)
    return torch.cat((values, values.new_zeros(missing))) if missing else values


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Rotary frequencies, with Llama 3's scaling where asked. [dim / 2] in float32"""
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
