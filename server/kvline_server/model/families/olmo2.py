"""OLMo 2: norms after the blocks instead of before them, and over all heads of query and key."""

from __future__ import annotations

from dataclasses import replace

from kvline_server.model.config import ModelConfig, Norms, dense
from kvline_server.model.fields import Fields

ARCHITECTURE = "Olmo2ForCausalLM"
MODEL_TYPE = "olmo2"


def read(fields: Fields) -> ModelConfig:
    bias = fields.flag("attention_bias")
    return replace(
        dense(fields, eps=1e-5),
        eos_token_ids=(50279,),
        norms=Norms(
            before_attention=None,
            after_attention="post_attention_layernorm",
            before_mlp=None,
            after_mlp="post_feedforward_layernorm",
        ),
        qk_norm="projection",
        qkv_bias=bias,
        output_bias=bias,
    )
