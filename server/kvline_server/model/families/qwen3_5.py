"""Qwen3.5: the gated delta rule in most layers, in the others attention with a gate of its output;
of a head a quarter is rotated. The text model, alone or of a checkpoint with a tower for images."""

from __future__ import annotations

from dataclasses import replace

from kvline_server.model import hybrid, towers
from kvline_server.model.config import ModelConfig, Names, Norms, dense
from kvline_server.model.fields import Fields
from kvline_server.model.positions import (
    PART,
    Rope,
    axes_of_images,
    read_rope,
    rope_fields,
    rope_theta,
)
from kvline_server.model.sequence import Kind

ARCHITECTURE = "Qwen3_5ForCausalLM"
MODEL_TYPE = "qwen3_5_text"
BESIDE = towers.QWEN
EVERY = "full_attention_interval"
DRAFTS = "mtp."


def read(fields: Fields) -> ModelConfig:
    fields.only("mlp_only_layers", [], [])
    model = qwen(fields, kv_heads=4, width="intermediate_size", by_key_head=False)
    # Its class finds both names.
    return replace(model, names=Names(others=BESIDE.decoders))


def qwen(fields: Fields, kv_heads: int, width: str, by_key_head: bool) -> ModelConfig:
    """What Qwen3.5's models and Qwen3-Next have in common; `width` is
    the MLP's field, `kv_heads` the default."""
    fields.only("attn_output_gate", True, True)
    for key in ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"):
        fields.value(key)
    model = dense(fields, _rope(fields), kv_heads=kv_heads, head_dim=256, width=width)
    every = fields.integer(EVERY, 4)
    usual = [hybrid.LINEAR if (i + 1) % every else hybrid.FULL for i in range(model.layers)]
    kinds = tuple((kind, Kind.MLP) for kind in hybrid.mixers(fields, "layer_types", usual))
    rule = hybrid.delta_rule(fields, by_key_head)
    bias = fields.flag("attention_bias")
    return replace(
        model,
        kinds=kinds,
        recurrent=rule if hybrid.recurs(kinds) else None,
        norms=Norms(offset=1.0),
        qk_norm="head",
        qkv_bias=bias,
        output_bias=bias,
        output_gate=True,
        left_out=(DRAFTS,),
        drafts=DRAFTS,
    )


def _rope(fields: Fields) -> Rope:
    scaling = rope_fields(fields, 10000.0)
    head_dim = fields.integer("head_dim", 256)
    usual = 1.0 if fields.null(PART) else 0.25
    dim = int(head_dim * scaling.number(PART, fields.number(PART, usual)))
    if not 0 < dim <= head_dim or dim % 2 or head_dim % 2:
        raise fields.invalid(PART, f"an even part of {head_dim} elements")
    axes = axes_of_images(scaling, dim // 2, [11, 11, 10], turns=True)
    rope = read_rope(fields, scaling, rope_theta(fields, 10000.0))
    return replace(rope, rotary_dim=dim, axes=axes)
