"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: fused projections, LongRoPE, and in Phi-4-mini heads of
which a part is rotated."""

from __future__ import annotations

import math
from dataclasses import replace

from kvline_server.model.config import ModelConfig, dense, every_window
from kvline_server.model.fields import Fields
from kvline_server.model.positions import (
    ORIGINAL,
    PART,
    LongScaling,
    Rope,
    read_rope,
    rope_fields,
    rope_kind,
    rope_theta,
)

ARCHITECTURE = "Phi3ForCausalLM"
MODEL_TYPE = "phi3"
LONG = ("longrope", "su", "yarn")  # what files of this family call the same
OWN_CODE = "modeling_phi3.Phi3ForCausalLM"


def read(fields: Fields) -> ModelConfig:
    # The authors' repositories name their own copy of this architecture's code, which is not run.
    code = fields.section("auto_map").value("AutoModelForCausalLM", OWN_CODE)
    if str(code).rpartition("--")[2] != OWN_CODE:
        raise fields.unsupported("auto_map", f", {OWN_CODE} is")
    return replace(
        dense(fields, _rope(fields), eps=1e-5),
        windows=every_window(fields),
        eos_token_ids=(32000,),
        qkv=("qkv_proj",),
        gate_up=("gate_up_proj",),
    )


def _rope(fields: Fields) -> Rope:
    theta = rope_theta(fields, 10000.0)
    scaling = rope_fields(fields, 10000.0)
    usual = fields.integer("hidden_size") // fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", usual)
    dim = int(head_dim * scaling.number(PART, fields.number(PART, 1.0)))
    if not 0 < dim <= head_dim or dim % 2 or head_dim % 2:
        raise fields.invalid(PART, f"an even part of {head_dim} elements")
    kind = rope_kind(scaling)
    if kind == "default":
        return replace(read_rope(fields, scaling, theta), rotary_dim=dim)
    if kind not in LONG:
        key = "rope_type" if "rope_type" in scaling.raw else "type"
        raise scaling.unsupported(key, "; default and longrope are")
    trained = fields.integer(ORIGINAL, 4096)
    if scaling.value(ORIGINAL, trained) != trained:
        raise scaling.unsupported(ORIGINAL, f" beside {ORIGINAL} {trained}")
    ratio = scaling.number("factor", fields.integer("max_position_embeddings") / trained)
    factor = math.sqrt(1 + math.log(ratio) / math.log(trained)) if min(ratio, trained) > 1 else 1.0
    long = LongScaling(
        short=scaling.numbers("short_factor", dim // 2),
        long=scaling.numbers("long_factor", dim // 2),
        original_max_position=trained,
        attention_factor=scaling.number("attention_factor", factor),
    )
    theta = scaling.number("rope_theta", theta)
    scaling.refuse_unread()
    return Rope(theta, long, rotary_dim=dim)
