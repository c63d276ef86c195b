"""Qwen2 and Qwen2.5: biases of query, key and value."""

from __future__ import annotations

from dataclasses import replace

from kvline_server.model.config import ModelConfig, dense
from kvline_server.model.fields import Fields

ARCHITECTURE = "Qwen2ForCausalLM"


def read(fields: Fields) -> ModelConfig:
    return replace(dense(fields), qkv_bias=True)
