"""Qwen3-Next: Qwen3.5's layers with a mixture of experts in each, and other tensors of its delta
rule, with the rows of each key head together."""

from __future__ import annotations

from kvline_server.model.config import ModelConfig
from kvline_server.model.families.qwen3_5_moe import mixture
from kvline_server.model.fields import Fields

ARCHITECTURE = "Qwen3NextForCausalLM"
MODEL_TYPE = "qwen3_next"


def read(fields: Fields) -> ModelConfig:
    for key, every in (("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        if fields.value(key, every) != every:
            raise fields.unsupported(key, f", {every!r} is: experts in every layer")
    renormalise = fields.flag("norm_topk_prob", True)
    return mixture(fields, renormalise, by_key_head=True)
