"""Qwen3.5 with a mixture of experts in every layer, and an expert that every token has."""

from __future__ import annotations

from dataclasses import replace

from kvline_server.model import towers
from kvline_server.model.config import ModelConfig, Names, SharedExpert, experts
from kvline_server.model.families.qwen3_5 import qwen
from kvline_server.model.fields import Fields
from kvline_server.model.sequence import Kind

ARCHITECTURE = "Qwen3_5MoeForCausalLM"
MODEL_TYPE = "qwen3_5_moe_text"
BESIDE = replace(
    towers.QWEN, architecture="Qwen3_5MoeForConditionalGeneration", model_type="qwen3_5_moe"
)


def read(fields: Fields) -> ModelConfig:
    fields.only("mlp_only_layers", [], [])
    fields.only("norm_topk_prob", True, True)  # which its class does not read
    model = mixture(fields, renormalise=True, by_key_head=False)
    return replace(model, names=Names(others=BESIDE.decoders))


def mixture(fields: Fields, renormalise: bool, by_key_head: bool) -> ModelConfig:
    """With experts in the place of MLPs."""
    fields.value("intermediate_size")  # of layers without experts, which it has not
    width = "moe_intermediate_size"
    model = qwen(fields, kv_heads=2, width=width, by_key_head=by_key_head)
    shared = SharedExpert(
        fields.integer("shared_expert_intermediate_size", 512),
        "mlp.shared_expert.",
        "mlp.shared_expert_gate",
    )
    many = experts(
        fields,
        "num_experts",
        renormalise,
        "mlp.",
        together=("experts.gate_up_proj", "experts.down_proj"),
        shared=shared,
    )
    kinds = tuple((mixer, Kind.EXPERTS) for mixer, _ in model.kinds)
    return replace(model, experts=many, kinds=kinds)
