"""gpt-oss: a mixture of experts in every layer, with biases and a clamped activation; a sink of
each attention head; a window in every other layer; YaRN."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvline_server.model.config import GLOBAL, LOCAL, ModelConfig, dense, experts, kinds_of_layers
from kvline_server.model.fields import Fields
from kvline_server.model.positions import (
    ORIGINAL,
    Rope,
    YarnScaling,
    read_rope,
    rope_fields,
    rope_theta,
)

ARCHITECTURE = "GptOssForCausalLM"
MODEL_TYPE = "gpt_oss"
THETA = 150_000.0
# Its class's, of files that have none.
ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    ORIGINAL: 4096,
}
ACTIVATION = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}  # of swiglu_oai


def read(fields: Fields) -> ModelConfig:
    for key, value in ACTIVATION.items():
        fields.only(key, value, value)
    rope = _rope(fields)
    model = dense(fields, rope, kv_heads=8, head_dim=64, eps=1e-5)
    many = experts(fields, "num_local_experts", True, "mlp.", router="router", stacked=True)
    # Older names beside their equals.
    fields.only("experts_per_token", many.chosen, many.chosen)
    fields.only("num_experts", many.count, many.count)
    fields.value("initial_context_length")  # the original length, where a file has YaRN
    if isinstance(rope.scaling, YarnScaling):
        length = rope.scaling.original_max_position
        fields.only("initial_context_length", length, length)
    bias = fields.flag("attention_bias", True)
    return replace(
        model,
        experts=many,
        activation="swiglu_oai",
        windows=_windows(fields, model.layers),
        qkv_bias=bias,
        output_bias=bias,
        sinks=True,
    )


def _rope(fields: Fields) -> Rope:
    scaling = rope_fields(fields, THETA)
    if not scaling.raw and fields.value("rope_parameters") is None:
        scaling = Fields(ROPE, fields.path, scaling.at)
    return read_rope(fields, scaling, rope_theta(fields, THETA))


def _windows(fields: Fields, layers: int) -> tuple[int, ...]:
    """Each layer's, by layer_types."""
    usual = [GLOBAL if layer % 2 else LOCAL for layer in range(layers)]
    kinds = kinds_of_layers(fields, usual)
    if LOCAL in kinds and fields.null("sliding_window"):
        raise fields.invalid("sliding_window", f"a positive integer beside {LOCAL}")
    window = fields.integer("sliding_window", 128)
    return tuple(window if kind == LOCAL else 0 for kind in kinds)
