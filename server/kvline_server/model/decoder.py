"""The decoder that Llama, Mistral, Qwen2 and Qwen3 share; they differ by flags of ModelConfig.

`forward` gives hidden states and never touches the LM head; `compute_logits` is another function
that sees only the rows somebody asked for.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from kvline_server.kernels.interface import Kernels, KVLayer
from kvline_server.model.config import ModelConfig
from kvline_server.model.loader import LayerWeights, Weights


class Decoder:
    def __init__(
        self, config: ModelConfig, weights: Weights, positions: int, kernels: Kernels
    ) -> None:
        self.config = config
        self.weights = weights
        self.kernels = kernels
        self.rope = kernels.rope_table(inverse_frequencies(config), positions)

    def forward(self, token_ids: torch.Tensor, cache: list[KVLayer], plan: Any) -> torch.Tensor:
        """Hidden states after the last norm. token_ids [rows] -> [rows, hidden]"""
        kernels, eps = self.kernels, self.config.norm_eps
        residual = self.weights.embedding[token_ids]
        normed = kernels.rms_norm(residual, self.weights.layers[0].input_norm, eps)
        following = [*(layer.input_norm for layer in self.weights.layers[1:]), self.weights.norm]
        for layer, norm, kv in zip(self.weights.layers, following, cache, strict=True):
            attended = self._attention(layer, normed, kv, plan)
            normed, residual = kernels.add_norm(attended, residual, layer.post_norm, eps)
            up = kernels.silu_and_mul(kernels.linear(normed, layer.gate_up, layer.gate_up_bias))
            down = kernels.linear(up, layer.down, layer.down_bias)
            normed, residual = kernels.add_norm(down, residual, norm, eps)
        return normed

    def _attention(
        self, layer: LayerWeights, x: torch.Tensor, kv: KVLayer, plan: Any
    ) -> torch.Tensor:
        c, kernels = self.config, self.kernels
        fused = kernels.linear(x, layer.qkv, layer.qkv_bias)
        heads = fused.view(x.shape[0], -1, c.head_dim)
        q, k, v = torch.split(heads, [c.heads, c.kv_heads, c.kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = kernels.rms_norm(q, layer.q_norm, c.norm_eps)
            k = kernels.rms_norm(k, layer.k_norm, c.norm_eps)
        out = kernels.attention(q, k, v, self.rope, kv, plan)
        return kernels.linear(out, layer.output, layer.output_bias)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the rows given. [rows, hidden] -> [rows, vocabulary]"""
        return self.kernels.logits(hidden, self.weights.head)


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
