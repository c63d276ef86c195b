"""Llama 2 and 3, and the many models of their shape."""

from __future__ import annotations

from dataclasses import replace

from kvline_server.model.config import ModelConfig, dense
from kvline_server.model.fields import Fields

ARCHITECTURE = "LlamaForCausalLM"
MODEL_TYPE = "llama"


def read(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias")
    model = replace(dense(fields), qkv_bias=bias, output_bias=bias, eos_token_ids=(2,))
    return replace(model, mlp_bias=fields.flag("mlp_bias"))
