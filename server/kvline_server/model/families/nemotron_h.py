"""Nemotron-H: each layer is one block, Mamba2, attention without positions, an MLP or a mixture of
experts; their activation is the square of what is positive, without a gate."""

from __future__ import annotations

from dataclasses import replace

from kvline_server.model import hybrid
from kvline_server.model.config import (
    Experts,
    ModelConfig,
    Names,
    Norms,
    SharedExpert,
    dense,
    experts,
)
from kvline_server.model.fields import Fields
from kvline_server.model.positions import Rope
from kvline_server.model.sequence import Kind

ARCHITECTURE = "NemotronHForCausalLM"
MODEL_TYPE = "nemotron_h"
OWN_CODE = "modeling_nemotron_h.NemotronHForCausalLM"
PATTERN = {"M": Kind.RECURRENT, "*": Kind.ATTENTION, "-": Kind.MLP, "E": Kind.EXPERTS}
NAMES = Names(
    decoder="backbone.",
    others=("model.",),
    embedding="embeddings",
    norm="norm_f",
    attention="mixer.",
    mlp="mixer.",
)
NORMS = Norms(before_attention="norm", before_mlp="norm")
BLOCKS = {**hybrid.MIXERS, "mlp": Kind.MLP, "moe": Kind.EXPERTS}
# Of positions, of what its class does not read or reads for training, and of draft layers.
UNREAD = (
    "rope_theta",
    "partial_rotary_factor",
    "num_hidden_layers",  # the list of blocks says
    "rms_norm_eps",
    "norm_eps",
    "chunk_size",
    "expand",
    "mamba_proj_bias",
    "time_step_rank",
    "time_step_min",
    "time_step_max",
    "time_step_floor",
    "rescale_prenorm_residual",
    "use_mamba_kernels",
    "num_logits_to_keep",
    "moe_shared_expert_overlap",
    "num_nextn_predict_layers",
    "mtp_hybrid_override_pattern",
    "mtp_layers_block_type",
)


OF_EXPERTS = (
    "n_group",
    "topk_group",
    "n_shared_experts",
    "moe_latent_size",
    "moe_shared_expert_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "norm_topk_prob",
    "moe_intermediate_size",
    "routed_scaling_factor",
)


def read(fields: Fields) -> ModelConfig:
    code = fields.section("auto_map").value("AutoModelForCausalLM", OWN_CODE)
    if str(code).rpartition("--")[2] != OWN_CODE:
        raise fields.unsupported("auto_map", f", {OWN_CODE} is")
    fields.only("mlp_hidden_act", "relu2", "relu2")
    # Its class never ties embeddings, and has no biases in attention.
    for key in ("residual_in_fp32", "tie_word_embeddings", "attention_bias"):
        fields.only(key, False, False)
    fields.only("sliding_window", None)
    for key in UNREAD:
        fields.value(key)
    kinds = _kinds(fields)
    model = dense(fields, Rope(10000.0), layers=len(kinds), kv_heads=8, head_dim=128)
    fields.only("attention_head_dim", model.head_dim, model.head_dim)
    return replace(
        model,
        eos_token_ids=(2,),
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        kinds=tuple((kind,) for kind in kinds),
        recurrent=hybrid.nemotron(fields) if Kind.RECURRENT in kinds else None,
        experts=_experts(fields, kinds),
        names=NAMES,
        norms=NORMS,
        gate_up=("up_proj",),
        activation="relu2",
        mlp_bias=fields.flag("mlp_bias"),
        rotates=False,
        left_out=("mtp.",),
    )


def _kinds(fields: Fields) -> list[Kind]:
    """Each layer's, of which one must be attention: the KV cache has the tokens of requests."""
    key, known = "layers_block_type", BLOCKS
    names, pattern = fields.value(key), fields.value("hybrid_override_pattern")
    if names is None and isinstance(pattern, str):
        key, known, names = "hybrid_override_pattern", PATTERN, list(pattern)
    if not isinstance(names, list) or not all(isinstance(n, str) and n in known for n in names):
        raise fields.invalid(key, f"layers, each of {', '.join(known)}")
    kinds = [known[name] for name in names]
    if Kind.ATTENTION not in kinds:
        raise fields.unsupported(key, " without a layer of attention")
    return kinds


def _experts(fields: Fields, kinds: list[Kind]) -> Experts | None:
    if Kind.EXPERTS not in kinds:
        for key in OF_EXPERTS:
            fields.value(key)
        return None
    for key in ("n_group", "topk_group", "n_shared_experts"):
        fields.only(key, 1, 1)
    latent = fields.integer("moe_latent_size") if fields.value("moe_latent_size") else 0
    if latent and fields.flag("mlp_bias"):
        raise fields.unsupported("mlp_bias", " beside moe_latent_size")
    shared = fields.integer("moe_shared_expert_intermediate_size", 7688)
    return experts(
        fields,
        "n_routed_experts",
        fields.flag("norm_topk_prob", True),
        "mixer.",
        names=("up_proj", "down_proj"),
        width=fields.integer("moe_intermediate_size", 7688),
        latent=latent,
        shared=SharedExpert(shared, "mixer.shared_experts."),
        scores="sigmoid",
        choice_bias="gate.e_score_correction_bias",
        scale=fields.number("routed_scaling_factor", 1.0),
    )
