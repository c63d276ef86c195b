"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from kvline_server.model.config import ModelConfig, experts
from kvline_server.model.families import mistral
from kvline_server.model.fields import Fields

ARCHITECTURE = "MixtralForCausalLM"


def read(fields: Fields) -> ModelConfig:
    at, names = "block_sparse_moe.", ("w1", "w3", "w2")
    chosen = experts(fields, "num_local_experts", True, at, names=names)
    return replace(mistral.read(fields), experts=chosen)
