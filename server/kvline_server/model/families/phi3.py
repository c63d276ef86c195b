"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: fused projections, LongRoPE, and in Phi-4-mini heads of
which a part is rotated."""

from __future__ import annotations

import math
from dataclasses import replace

from kvline_server.model.config import (
    LongScaling,
    ModelConfig,
    Rope,
    dense,
    every_window,
    read_rope,
    rope_fields,
)
from kvline_server.model.fields import Fields

ARCHITECTURE = "Phi3ForCausalLM"
OWN_CODE = "modeling_phi3.Phi3ForCausalLM"


def read(fields: Fields) -> ModelConfig:
    # The authors' repositories name their own copy of this architecture's code, which is not run.
    code = fields.section("auto_map").value("AutoModelForCausalLM", OWN_CODE)
    if str(code).rpartition("--")[2] != OWN_CODE:
        raise fields.unsupported("auto_map", f", {OWN_CODE} is")
    return replace(
        dense(fields, _rope(fields)),
        windows=every_window(fields),
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        qkv=("qkv_proj",),
        gate_up=("gate_up_proj",),
    )


def _rope(fields: Fields) -> Rope:
    scaling = rope_fields(fields)
    usual = fields.integer("hidden_size") // fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", usual)
    part = fields.number("partial_rotary_factor", 1.0)
    dim = int(head_dim * scaling.number("partial_rotary_factor", part))
    if not 0 < dim <= head_dim or dim % 2 or head_dim % 2:
        raise fields.invalid("partial_rotary_factor", f"an even part of {head_dim} elements")
    theta = fields.number("rope_theta", 10000.0)
    if scaling.value("rope_type", scaling.value("type")) not in ("longrope", "su"):
        return replace(read_rope(scaling, theta), rotary_dim=dim)
    trained = scaling.value("original_max_position_embeddings", 4096)
    trained = fields.integer("original_max_position_embeddings", trained)
    ratio = scaling.number("factor", fields.integer("max_position_embeddings") / trained)
    factor = math.sqrt(1 + math.log(ratio) / math.log(trained)) if min(ratio, trained) > 1 else 1.0
    long = LongScaling(
        short=scaling.numbers("short_factor", dim // 2),
        long=scaling.numbers("long_factor", dim // 2),
        original_max_position=trained,
        attention_factor=scaling.number("attention_factor", factor),
    )
    return Rope(scaling.number("rope_theta", theta), long, rotary_dim=dim)
