"""Qwen3-VL, dense: the text model of a checkpoint with a tower for images, which is Qwen3."""

from __future__ import annotations

from dataclasses import replace

from kvline_server.model import towers
from kvline_server.model.config import ModelConfig, dense
from kvline_server.model.fields import Fields
from kvline_server.model.positions import Rope, axes_of_images, read_rope, rope_fields, rope_theta

ARCHITECTURE = "Qwen3VLForConditionalGeneration"
MODEL_TYPE = "qwen3_vl_text"
BESIDE = replace(towers.QWEN, architecture=ARCHITECTURE, model_type="qwen3_vl")


def read(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias")
    model = dense(fields, rope(fields), kv_heads=32, head_dim=128)
    return replace(model, qk_norm="head", qkv_bias=bias, output_bias=bias)


def rope(fields: Fields) -> Rope:
    scaling = rope_fields(fields, 500000.0)
    axes = axes_of_images(scaling, fields.integer("head_dim", 128) // 2, [24, 20, 20], turns=True)
    return replace(read_rope(fields, scaling, rope_theta(fields, 500000.0)), axes=axes)
