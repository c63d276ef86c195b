"""Qwen3-VL with a mixture of experts in every layer. A file has one tensor of all experts, with the
inputs of each before its outputs as published, or after them as transformers saves it."""

from __future__ import annotations

from dataclasses import replace

from kvline_server.model import towers
from kvline_server.model.config import ModelConfig, dense, experts
from kvline_server.model.families.qwen3_moe import in_every_layer
from kvline_server.model.families.qwen3_vl import rope
from kvline_server.model.fields import Fields

ARCHITECTURE = "Qwen3VLMoeForConditionalGeneration"
MODEL_TYPE = "qwen3_vl_moe_text"
BESIDE = replace(
    towers.QWEN, architecture=ARCHITECTURE, model_type="qwen3_vl_moe", unasked_tie=True
)


def read(fields: Fields) -> ModelConfig:
    count = in_every_layer(fields)
    fields.only("norm_topk_prob", True, True)  # which its class does not read
    bias = fields.flag("attention_bias")
    return replace(
        dense(fields, rope(fields), kv_heads=16, width="moe_intermediate_size"),
        experts=experts(
            fields,
            count,
            True,
            "mlp.",
            names=(),
            together=("experts.gate_up_proj", "experts.down_proj"),
            transposes=True,
        ),
        qk_norm="head",
        qkv_bias=bias,
        output_bias=bias,
    )
