"""The decoder that Llama, Mistral, Qwen2 and Qwen3 share; they differ by flags of ModelConfig.

`forward` gives hidden states and never touches the LM head; `compute_logits` is another function
that sees only the rows somebody asked for, in blocks of a fixed row count, so that neither the
chunk size nor a row's neighbours change a bit of its logits.
"""

from __future__ import annotations

import math

import torch

from kvline_server.config import LOGIT_BLOCK
from kvline_server.engine.batch import Batch
from kvline_server.kernels import torch as kernels
from kvline_server.model.config import ModelConfig
from kvline_server.model.loader import LayerWeights, Weights


class Decoder:
    def __init__(self, config: ModelConfig, weights: Weights, positions: int) -> None:
        self.config = config
        self.weights = weights
        self.rope = kernels.rope_table(
            inverse_frequencies(config), positions, weights.embedding.dtype
        )

    def forward(self, batch: Batch, cache: list[kernels.KVLayer]) -> torch.Tensor:
        """Hidden states after the last norm. [tokens, hidden]"""
        eps = self.config.norm_eps
        rope = self.rope[batch.positions]
        residual = self.weights.embedding[batch.token_ids]
        for layer, kv in zip(self.weights.layers, cache, strict=True):
            normed = kernels.rms_norm(residual, (self.config.hidden,), layer.input_norm, eps)
            residual = residual + self._attention(layer, normed, rope, batch, kv)
            normed = kernels.rms_norm(residual, (self.config.hidden,), layer.post_norm, eps)
            hidden = kernels.silu_and_mul(kernels.linear(normed, layer.gate_up, layer.gate_up_bias))
            residual = residual + kernels.linear(hidden, layer.down, layer.down_bias)
        return kernels.rms_norm(residual, (self.config.hidden,), self.weights.norm, eps)

    def _attention(
        self,
        layer: LayerWeights,
        x: torch.Tensor,  # [tokens, hidden]
        rope: torch.Tensor,
        batch: Batch,
        kv: kernels.KVLayer,
    ) -> torch.Tensor:
        c = self.config
        fused = kernels.linear(x, layer.qkv, layer.qkv_bias)
        split = fused.view(x.shape[0], -1, c.head_dim)
        q = split[:, : c.heads]
        k = split[:, c.heads : c.heads + c.kv_heads]
        v = split[:, c.heads + c.kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = kernels.rms_norm(q, (c.head_dim,), layer.q_norm, c.norm_eps)
            k = kernels.rms_norm(k, (c.head_dim,), layer.k_norm, c.norm_eps)
        q = kernels.apply_rope(q, rope)
        kernels.append(kv, batch.slots, kernels.apply_rope(k, rope), v)
        out = torch.empty_like(q)
        for group in batch.decodes:
            out[group.start : group.end] = kernels.decode_attention(
                q[group.start : group.end], kv, group
            )
        for part in batch.prefills:
            out[part.start : part.end] = kernels.prefill_attention(
                q[part.start : part.end], kv, part
            )
        return kernels.linear(out.view(-1, c.heads * c.head_dim), layer.output, layer.output_bias)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of the rows given. [rows, hidden] -> [rows, vocabulary] in float32"""
        rows = hidden.shape[0]
        out = torch.empty((rows, self.config.vocabulary), dtype=torch.float32, device=hidden.device)
        for start in range(0, rows, LOGIT_BLOCK):
            block = hidden[start : start + LOGIT_BLOCK]
            have = block.shape[0]
            if have < LOGIT_BLOCK:
                block = torch.cat((block, block.new_zeros(LOGIT_BLOCK - have, block.shape[1])))
            out[start : start + have] = kernels.linear(block, self.weights.head)[:have]
        return out


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
