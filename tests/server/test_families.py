"""Configurations as the models' authors publish them, in the fields that matter here."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from kvline_server.errors import ModelInvalid, ModelUnsupported, ServerError
from kvline_server.kernels import cuda_experts, cuda_write
from kvline_server.memory.groups import order
from kvline_server.model import shard
from kvline_server.model.config import Experts, ModelConfig, read_config
from kvline_server.model.loader import RandomSource, checked
from kvline_server.model.positions import LongScaling, Rope, YarnScaling
from kvline_server.model.rope import cos_sin

PHI4_MINI: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
        "AutoTokenizer": "Xenova/gpt-4o",
    },
    "full_attn_mod": 1,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "max_position_embeddings": 131072,
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "original_max_position_embeddings": 4096,
    "partial_rotary_factor": 0.75,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"long_factor": [8.0] * 48, "short_factor": [1.5] * 48, "type": "longrope"},
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}
PHI3_MINI = PHI4_MINI | {
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "partial_rotary_factor": None,
    "rope_scaling": None,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
}
GEMMA3_1B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "eos_token_id": [1, 106],
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
OLMO2: dict[str, Any] = {
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "vocab_size": 100352,
}


QWEN3_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}

GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
GPT_OSS_120B = GPT_OSS_20B | {
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "num_hidden_layers": 36,
    "num_local_experts": 128,
}


def windows(model: ModelConfig) -> tuple[int, ...]:
    """Of the groups of its layers."""
    return tuple(order(model.every_window, model.max_position))


def read(folder: Path, raw: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(raw))
    return read_config(folder)


def test_phi4_mini_rotates_three_quarters_of_a_head(tmp_path: Path) -> None:
    model = read(tmp_path, PHI4_MINI)
    factor = math.sqrt(1 + math.log(32) / math.log(4096))
    scaling = LongScaling((1.5,) * 48, (8.0,) * 48, 4096, factor)
    assert model.rope == Rope(10000.0, scaling, rotary_dim=96)
    assert (model.head_dim, model.tied_embeddings, windows(model)) == (128, True, (0,))
    assert model.qkv == ("qkv_proj",) and model.gate_up == ("gate_up_proj",)


def test_an_original_length_of_one_is_no_division_by_zero(tmp_path: Path) -> None:
    rope = read(tmp_path, PHI4_MINI | {"original_max_position_embeddings": 1}).rope
    assert isinstance(rope.scaling, LongScaling) and rope.scaling.attention_factor == 1.0


def test_longrope_takes_its_factors_by_the_served_length(tmp_path: Path) -> None:
    """Above the original length the long ones."""
    rope = read(tmp_path, PHI4_MINI).rope
    assert isinstance(rope.scaling, LongScaling)
    for positions, divisor in ((4096, 1.5), (4097, 8.0)):
        cos, sin = cos_sin(rope, 128, positions)
        assert cos.shape == sin.shape == (positions, 48)
        factor = rope.scaling.attention_factor
        assert cos[0].tolist() == pytest.approx([factor] * 48)
        assert float(sin[1, 0]) == pytest.approx(factor * math.sin(1 / divisor))


def test_phi3_mini_has_a_window_in_every_layer(tmp_path: Path) -> None:
    model = read(tmp_path, PHI3_MINI)
    assert model.rope == Rope(10000.0, rotary_dim=96) and model.head_dim == 96
    assert model.windows == (2047,) * 32 and windows(model) == (2047,)


def test_gemma3_has_a_window_in_five_of_six_layers(tmp_path: Path) -> None:
    model = read(tmp_path, GEMMA3_1B)
    assert model.windows == (((512,) * 5 + (0,)) * 5)[:26]
    assert (model.rope_of(5), model.rope_of(4)) == (Rope(1e6), Rope(1e4))
    assert model.softmax_scale == 1 / 16 and model.embedding_scale == math.sqrt(1152)
    assert model.tied_embeddings and model.norms.offset == 1.0


def test_qwen3_30b_has_128_small_experts_and_chooses_eight(tmp_path: Path) -> None:
    model = read(tmp_path, QWEN3_30B)
    assert model.experts == Experts(128, 8, True, "mlp.")
    assert (model.intermediate, model.qk_norm) == (768, "head")
    elements = checked(RandomSource(), model).counts[None]
    assert elements == 30_532_122_624  # as its authors' index says, in bytes of two


def test_mixtral_has_eight_experts_and_chooses_two(tmp_path: Path) -> None:
    model = read(tmp_path, MIXTRAL)
    names = ("w1", "w3", "w2")
    assert model.experts == Experts(8, 2, True, "block_sparse_moe.", names)
    assert checked(RandomSource(), model).counts[None] == 46_702_792_704


@pytest.mark.parametrize(
    ("raw", "elements", "nbytes"),
    [
        (GPT_OSS_20B, 20_914_757_184, 13_761_264_768),
        (GPT_OSS_120B, 116_829_156_672, 65_248_815_744),
    ],
)
def test_gpt_oss_has_experts_in_4_bits_and_a_window_in_every_other_layer(
    raw: dict[str, Any], elements: int, nbytes: int, tmp_path: Path
) -> None:
    model = read(tmp_path, raw)
    layers, count = raw["num_hidden_layers"], raw["num_local_experts"]
    assert model.experts == Experts(
        count, 4, True, "mlp.", router="router", stacked=True, mxfp4=True
    )
    assert model.windows == (128, 0) * (layers // 2) and model.activation == "swiglu_oai"
    scaling = YarnScaling(
        32.0, 4096, 0.1 * math.log(32) + 1, 32.0, 1.0, truncate=False, longest=131072
    )
    assert model.rope == Rope(150_000.0, scaling) and model.max_position == 131072
    assert model.qkv_bias and model.output_bias and model.sinks and not model.tied_embeddings
    weights = checked(RandomSource(), model)
    in_4_bits = layers * count * 3 * 2880 * 2880
    assert weights.counts[torch.uint8] == in_4_bits // 2 + in_4_bits // 32
    sinks = weights.counts[torch.float32]
    assert weights.counts[None] + sinks + in_4_bits == elements and sinks == layers * 64
    assert weights.nbytes(torch.bfloat16) == nbytes + 2 * sinks  # which the files have in bfloat16
    for ranks, error in ((2, ""), (4, "90 blocks of 32 .*; gpus can be 1 or 2$")):
        with pytest.raises(ModelUnsupported, match=error) if error else nullcontext():
            shard.check(model, ranks)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step 2 is not supported, 1 is"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers \[0\] is not supported"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok: expected at most num_experts, 128"),
        ({"num_experts": None}, "num_experts: expected a positive integer"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size: expected a positive integer"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ],
)
def test_experts_that_are_not_served_are_refused_by_the_field(
    change: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(ServerError, match=why):
        read(tmp_path, QWEN3_30B | change)


def test_olmo2_has_norms_after_its_blocks_alone(tmp_path: Path) -> None:
    model = read(tmp_path, OLMO2)
    assert model.norms.before_attention is model.norms.before_mlp is None
    assert model.qk_norm == "projection" and model.rope == Rope(500000.0)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (PHI4_MINI, ""),
        (OLMO2, ""),
        (PHI3_MINI, "head size 96"),
        (GEMMA3_1B, ""),
        (QWEN3_30B, ""),
        (MIXTRAL, ""),
    ],
    ids=["phi4-mini", "olmo2", "phi3-mini", "gemma3", "qwen3-30b", "mixtral"],
)
def test_which_families_the_prebuilt_kernels_run(
    tmp_path: Path, raw: dict[str, Any], why: str
) -> None:
    c = read(tmp_path, raw)
    needs = c.heads, c.kv_heads, c.head_dim
    if not why:
        cuda_write.check(*needs)
        if c.experts is not None:
            cuda_experts.check(c.experts.count, c.experts.chosen, c.hidden, c.intermediate)
    else:
        with pytest.raises(RuntimeError, match=why):
            cuda_write.check(*needs)


@pytest.mark.parametrize(
    ("base", "change", "error", "named"),
    [
        (PHI4_MINI, {"rope_scaling": {"type": "yarn"}}, ModelInvalid, "short_factor"),
        (PHI4_MINI, {"partial_rotary_factor": 0.67}, ModelInvalid, "partial_rotary_factor"),
        (PHI4_MINI, {"partial_rotary_factor": 0.5}, ModelInvalid, "short_factor: .*32 numbers"),
        (PHI4_MINI, {"lm_head_bias": True}, ModelUnsupported, "lm_head_bias"),
        (PHI4_MINI, {"auto_map": {"AutoModelForCausalLM": "a.B"}}, ModelUnsupported, "auto_map"),
        (PHI4_MINI, {"auto_map": 3}, ModelInvalid, "auto_map: expected an object"),
        (GEMMA3_1B, {"hidden_activation": "gelu"}, ModelUnsupported, "hidden_activation"),
        (GEMMA3_1B, {"final_logit_softcapping": 30.0}, ModelUnsupported, "final_logit_softcapping"),
        (GEMMA3_1B, {"attn_logit_softcapping": 50.0}, ModelUnsupported, "attn_logit_softcapping"),
        (GEMMA3_1B, {"use_bidirectional_attention": True}, ModelUnsupported, "use_bidirectional"),
        (GEMMA3_1B, {"layer_types": ["full_attention"]}, ModelInvalid, "layer_types.*26 layers"),
        (GEMMA3_1B, {"layer_types": [[]] * 26}, ModelInvalid, "layer_types"),
        (GEMMA3_1B, {"rope_scaling": {"rope_type": "yarn"}}, ModelInvalid, "rope_scaling.factor"),
        (OLMO2, {"layer_types": ["sliding_attention"] * 32}, ModelUnsupported, "layer_types"),
        (OLMO2, {"hidden_act": "gelu"}, ModelUnsupported, "hidden_act"),
        (PHI4_MINI, {"rope_scaling": {"type": "linear"}}, ModelUnsupported, "type 'linear'"),
        (GEMMA3_1B, {"sliding_window": None}, ModelInvalid, "sliding_window"),
        (GEMMA3_1B, {"rope_parameters": {"rope_type": "yarn"}}, ModelUnsupported, "rope_type"),
        (QWEN3_30B, {"use_qk_norm": False}, ModelUnsupported, "use_qk_norm False .*, True is"),
        (QWEN3_30B, {"shared_expert_intermediate_size": 8}, ModelUnsupported, "shared_expert"),
        (QWEN3_30B, {"num_local_experts": 64}, ModelUnsupported, "num_local_experts 64"),
        (OLMO2, {"sliding_window": 4095}, ModelUnsupported, "sliding_window"),
        (GPT_OSS_20B, {"swiglu_limit": 6.0}, ModelUnsupported, "swiglu_limit 6.0 .*, 7.0 is"),
        (GPT_OSS_20B, {"swiglu_alpha": 1.0}, ModelUnsupported, "swiglu_alpha 1.0 .*, 1.702 is"),
        (GPT_OSS_20B, {"experts_per_token": 2}, ModelUnsupported, "experts_per_token 2 .*, 4 is"),
        (GPT_OSS_20B, {"num_experts": 64}, ModelUnsupported, "num_experts 64 .*, 32 is"),
        (GPT_OSS_20B, {"initial_context_length": 8192}, ModelUnsupported, "initial_context_length"),
        (GPT_OSS_20B, {"hidden_act": "gelu"}, ModelUnsupported, "hidden_act"),
        (GPT_OSS_20B, {"sliding_window": None}, ModelInvalid, "sliding_window: expected a pos"),
        (GPT_OSS_20B, {"layer_types": ["full_attention"]}, ModelInvalid, "layer_types.*24 layers"),
        (GPT_OSS_20B, {"num_experts_per_tok": 33}, ModelInvalid, "at most num_local_experts, 32"),
    ],
)
@pytest.mark.fault("F56", shows="so is each option of a family that is not implemented")
def test_an_option_that_is_not_run_is_refused_by_name(
    tmp_path: Path,
    base: dict[str, Any],
    change: dict[str, Any],
    error: type[ServerError],
    named: str,
) -> None:
    with pytest.raises(error, match=named):
        read(tmp_path, base | change)
