"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from kvline_server.model.config import ModelConfig, dense, every_window, experts
from kvline_server.model.fields import Fields

ARCHITECTURE = "MixtralForCausalLM"
MODEL_TYPE = "mixtral"


def read(fields: Fields) -> ModelConfig:
    at, names = "block_sparse_moe.", ("w1", "w3", "w2")
    chosen = experts(fields, "num_local_experts", True, at, names=names)
    model = dense(fields, kv_heads=8, theta=1e6, eps=1e-5)
    return replace(model, experts=chosen, windows=every_window(fields), eos_token_ids=(2,))
