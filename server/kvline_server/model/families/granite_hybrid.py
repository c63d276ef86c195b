"""Granite 4 (GraniteMoeHybrid): Mamba2 in most layers, attention in the others, mostly without
positions; in each an MLP, in many models beside a mixture of experts; and four multipliers."""

from __future__ import annotations

from dataclasses import replace

from kvline_server.model import hybrid
from kvline_server.model.config import ModelConfig, Names, SharedExpert, dense, experts
from kvline_server.model.fields import Fields
from kvline_server.model.sequence import Kind

ARCHITECTURE = "GraniteMoeHybridForCausalLM"
MODEL_TYPE = "granitemoehybrid"
POSITIONS = "position_embedding_type"
UNREAD = ("mamba_chunk_size", "init_method", "logits_to_keep")


def read(fields: Fields) -> ModelConfig:
    fields.only("normalization_function", "rmsnorm", "rmsnorm")
    if fields.value(POSITIONS) not in (None, "nope", "rope"):
        raise fields.unsupported(POSITIONS, ", nope and rope are")
    for key in UNREAD:
        fields.value(key)
    model = dense(fields)
    newer, older = "layer_types", "layers_block_type"
    every = older if fields.value(older) is not None and newer not in fields.raw else newer
    mixers = hybrid.mixers(fields, every, [hybrid.LINEAR] * model.layers)
    bias = fields.flag("attention_bias")
    width = fields.integer("shared_intermediate_size", 1024)
    model = replace(
        model,
        eos_token_ids=(2,),
        recurrent=hybrid.granite(fields) if Kind.RECURRENT in mixers else None,
        rotates=fields.value(POSITIONS) == "rope",
        qkv_bias=bias,
        output_bias=bias,
        embedding_scale=_multiplier(fields, "embedding_multiplier"),
        residual_scale=_multiplier(fields, "residual_multiplier"),
        softmax_scale=_multiplier(fields, "attention_multiplier"),
        logits_divisor=_multiplier(fields, "logits_scaling"),
        names=Names(mlp="shared_mlp.", down="output_linear"),
        gate_up=("input_linear",),
    )
    if fields.value("num_local_experts", 8) == 0:
        fields.value("num_experts_per_tok")
        kinds = tuple((mixer, Kind.MLP) for mixer in mixers)
        return replace(model, intermediate=width, kinds=kinds)
    many = experts(
        fields,
        "num_local_experts",
        True,
        "block_sparse_moe.",
        names=(),
        router="router.layer",
        together=("input_linear.weight", "output_linear.weight"),
        shared=SharedExpert(width, "shared_mlp."),
    )
    return replace(model, experts=many, kinds=tuple((mixer, Kind.EXPERTS) for mixer in mixers))


def _multiplier(fields: Fields, key: str) -> float:
    if fields.null(key):  # which its class cannot multiply by
        raise fields.invalid(key, "a positive number")
    return fields.number(key, 1.0)
