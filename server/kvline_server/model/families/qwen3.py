"""Qwen3: norms of each query and key head."""

from __future__ import annotations

from dataclasses import replace

from kvline_server.model.config import ModelConfig, dense
from kvline_server.model.families.qwen2 import upper_windows
from kvline_server.model.fields import Fields

ARCHITECTURE = "Qwen3ForCausalLM"
MODEL_TYPE = "qwen3"


def read(fields: Fields) -> ModelConfig:
    fields.only("use_qk_norm", True, True)  # some files say so
    bias = fields.flag("attention_bias")
    model = dense(fields, kv_heads=32, head_dim=128)
    model = replace(model, qk_norm="head", qkv_bias=bias, output_bias=bias)
    return replace(model, windows=upper_windows(fields))
