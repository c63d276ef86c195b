"""Gemma 3's text models: four norms a layer, most layers with a sliding window and a rotary table
of their own, GELU, a scaled embedding."""

from __future__ import annotations

import math
from dataclasses import replace

from kvline_server.model.config import ModelConfig, Norms, dense, read_rope
from kvline_server.model.fields import Fields

ARCHITECTURE = "Gemma3ForCausalLM"
GELU = "gelu_pytorch_tanh"
LOCAL, GLOBAL = "sliding_attention", "full_attention"


def read(fields: Fields) -> ModelConfig:
    if fields.value("hidden_activation", GELU) != GELU:
        raise fields.unsupported("hidden_activation", f", {GELU} is")
    ropes = fields.section("rope_parameters")
    scaling = ropes.section(GLOBAL) if ropes.raw else fields.section("rope_scaling")
    model = dense(fields, read_rope(scaling, fields.number("rope_theta", 1e6)))
    bias = fields.flag("attention_bias")
    return replace(
        model,
        head_dim=fields.integer("head_dim", 256),
        local_rope=read_rope(ropes.section(LOCAL), fields.number("rope_local_base_freq", 1e4)),
        windows=_windows(fields, model.layers),
        softmax_scale=fields.number("query_pre_attn_scalar", 256) ** -0.5,
        norms=Norms(
            before_attention="input_layernorm",
            after_attention="post_attention_layernorm",
            before_mlp="pre_feedforward_layernorm",
            after_mlp="post_feedforward_layernorm",
            offset=1.0,
        ),
        qk_norm="head",
        qkv_bias=bias,
        output_bias=bias,
        activation="gelu_tanh",
        embedding_scale=math.sqrt(model.hidden),
        tied_embeddings=fields.flag("tie_word_embeddings", True),
    )


def _windows(fields: Fields, layers: int) -> tuple[int, ...]:
    """Each layer's, by layer_types; older files give every how many layers one has no window."""
    window = fields.integer("sliding_window", 4096)
    every = fields.integer("sliding_window_pattern", 6)
    usual = [LOCAL if (layer + 1) % every else GLOBAL for layer in range(layers)]
    kinds = fields.value("layer_types", usual)
    if (
        not isinstance(kinds, list)
        or [kind in (LOCAL, GLOBAL) for kind in kinds] != [True] * layers
    ):
        raise fields.invalid("layer_types", f"{LOCAL} or {GLOBAL} for {layers} layers")
    return tuple(window if kind == LOCAL else 0 for kind in kinds)
