"""Mistral: Llama without biases, in early versions with a sliding window in every layer."""

from __future__ import annotations

from dataclasses import replace

from kvline_server.model.config import ModelConfig, dense, every_window
from kvline_server.model.fields import Fields

ARCHITECTURE = "MistralForCausalLM"
MODEL_TYPE = "mistral"


def read(fields: Fields) -> ModelConfig:
    windows = every_window(fields, default=4096)
    return replace(dense(fields, kv_heads=8), windows=windows, eos_token_ids=(2,))
