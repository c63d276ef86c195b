"""Qwen3-MoE: Qwen3 with a mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from kvline_server.model.config import ModelConfig, dense, every_window, experts
from kvline_server.model.fields import Fields

ARCHITECTURE = "Qwen3MoeForCausalLM"
MODEL_TYPE = "qwen3_moe"


def read(fields: Fields) -> ModelConfig:
    count = in_every_layer(fields)
    fields.only("use_qk_norm", True, True)  # some files say so
    windows = every_window(fields, default=4096)
    bias = fields.flag("attention_bias")
    return replace(
        dense(fields, kv_heads=4, width="moe_intermediate_size"),
        experts=experts(fields, count, fields.flag("norm_topk_prob"), "mlp."),
        windows=windows if fields.flag("use_sliding_window") else (),
        qk_norm="head",
        qkv_bias=bias,
        output_bias=bias,
    )


def in_every_layer(fields: Fields) -> str:
    """Refuses layers without experts. -> the field that has the number of experts"""
    for key, every in (("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        if fields.value(key, every) != every:
            raise fields.unsupported(key, f", {every!r} is: experts in every layer")
    fields.value("intermediate_size")  # of layers without experts, which it has not
    count, other = "num_experts", "num_local_experts"  # the second is in newer files
    if other in fields.raw and count not in fields.raw:
        count, other = other, count
    fields.only(other, fields.raw.get(count), fields.raw.get(count))
    return count
