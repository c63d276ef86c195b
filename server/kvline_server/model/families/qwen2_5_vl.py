"""Qwen2.5-VL: the text model of a checkpoint with a tower for images, which is Qwen2.5."""

from __future__ import annotations

from dataclasses import replace

from kvline_server.model import towers
from kvline_server.model.config import ModelConfig, dense
from kvline_server.model.families.qwen2 import upper_windows
from kvline_server.model.fields import Fields
from kvline_server.model.positions import Rope, axes_of_images, read_rope, rope_fields, rope_theta

ARCHITECTURE = "Qwen2_5_VLForConditionalGeneration"
MODEL_TYPE = "qwen2_5_vl_text"
BESIDE = replace(
    towers.QWEN,
    architecture=ARCHITECTURE,
    model_type="qwen2_5_vl",
    decoders=("model.", "model.language_model."),
    towers=("visual.", "model.visual."),
    fields=(*towers.QWEN.fields, "vision_token_id"),
    flat=True,
)


def read(fields: Fields) -> ModelConfig:
    fields.flag("attention_bias")  # the class does not read it: what has biases is fixed
    model = dense(fields, _rope(fields), kv_heads=8, eps=1e-5)
    return replace(model, eos_token_ids=(151645,), qkv_bias=True, windows=upper_windows(fields, 80))


def _rope(fields: Fields) -> Rope:
    """Files name the axes of images as the kind of its scaling, which is none."""
    scaling = rope_fields(fields, 1e6)
    usual = fields.integer("hidden_size") // fields.integer("num_attention_heads")
    pairs = fields.integer("head_dim", usual) // 2
    axes = axes_of_images(scaling, pairs, [16, 24, 24], turns=False)
    for key in ("type", "rope_type"):
        if scaling.raw.get(key) == "mrope":
            scaling.raw = {**scaling.raw, key: "default"}
    return replace(read_rope(fields, scaling, rope_theta(fields, 1e6)), axes=axes)
