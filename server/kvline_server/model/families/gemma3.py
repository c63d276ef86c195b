"""Gemma 3's text models: four norms a layer, most layers with a sliding window and a rotary table
of their own, GELU, a scaled embedding."""

from __future__ import annotations

import math
from dataclasses import replace

from kvline_server.model.config import GLOBAL, LOCAL, ModelConfig, Norms, dense, kinds_of_layers
from kvline_server.model.fields import Fields
from kvline_server.model.positions import read_rope, rope_theta
from kvline_server.model.towers import Beside

ARCHITECTURE = "Gemma3ForCausalLM"
MODEL_TYPE = "gemma3_text"
BESIDE = Beside(
    architecture="Gemma3ForConditionalGeneration",
    model_type="gemma3",
    decoders=("language_model.model.", "model.language_model."),
    towers=tuple(
        f"{at}{tower}."
        for at in ("", "model.")
        for tower in ("vision_tower", "multi_modal_projector")
    ),
    fields=(
        "vision_config",
        "mm_tokens_per_image",
        "image_token_index",
        "boi_token_index",
        "eoi_token_index",
    ),
)
GELU = "gelu_pytorch_tanh"


# What published files with a tower leave to the class.
USUAL = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "max_position_embeddings": 131072,
}


def read(fields: Fields) -> ModelConfig:
    fields.raw = USUAL | fields.raw
    fields.only("hidden_activation", GELU, GELU)
    fields.only("hidden_act", GELU, GELU)  # which its class does not read
    ropes = fields.section("rope_parameters")
    # What a user adds is of the layers without a window, as in transformers.
    whole, more = ropes.section(GLOBAL), fields.section("rope_scaling")
    added = Fields(whole.raw | more.raw, fields.path, more.at if more.raw else whole.at)
    added.only("truncate", True, True)  # of YaRN, which its class does not read
    local = read_rope(fields, ropes.section(LOCAL), fields.number("rope_local_base_freq", 1e4))
    ropes.refuse_unread()
    model = dense(
        fields,
        read_rope(fields, added, rope_theta(fields, 1e6)),
        kv_heads=4,
        head_dim=256,
        tied=True,
    )
    bias = fields.flag("attention_bias")
    return replace(
        model,
        eos_token_ids=(1,),
        local_rope=local,
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
    )


def _windows(fields: Fields, layers: int) -> tuple[int, ...]:
    """Each layer's, by layer_types; older files give every how many layers one has no window."""
    if fields.null("sliding_window"):
        raise fields.invalid("sliding_window", "a positive integer")
    window = fields.integer("sliding_window", 4096)
    every = fields.integer("sliding_window_pattern", 6)
    usual = [LOCAL if (layer + 1) % every else GLOBAL for layer in range(layers)]
    kinds = kinds_of_layers(fields, usual)
    return tuple(window if kind == LOCAL else 0 for kind in kinds)
