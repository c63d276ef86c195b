"""Qwen3: norms of each query and key head."""

from __future__ import annotations

from dataclasses import replace

from kvline_server.model.config import ModelConfig, dense
from kvline_server.model.fields import Fields

ARCHITECTURE = "Qwen3ForCausalLM"


def read(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias")
    return replace(dense(fields), qk_norm="head", qkv_bias=bias, output_bias=bias)
