"""Qwen3-MoE: Qwen3 with a mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from kvline_server.model.config import ModelConfig, experts
from kvline_server.model.families import qwen3
from kvline_server.model.fields import Fields

ARCHITECTURE = "Qwen3MoeForCausalLM"


def read(fields: Fields) -> ModelConfig:
    for key, every in (("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        if fields.value(key, every) != every:
            raise fields.unsupported(key, f", {every!r} is: experts in every layer")
    count = "num_experts" if "num_experts" in fields.raw else "num_local_experts"  # newer files
    chosen = experts(fields, count, fields.flag("norm_topk_prob"), "mlp.")
    width = fields.integer("moe_intermediate_size")
    return replace(qwen3.read(fields), experts=chosen, intermediate=width)
