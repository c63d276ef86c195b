"""The shapes of the GPU figures, with random weights: Llama-3.1-8B and Qwen3-0.6B in all of them,
Llama-3.1-70B where there are several GPUs, Qwen3-30B-A3B of mixtures of experts, Gemma-3-12B of
sliding windows, gpt-oss' of experts in 4 bits, hybrids of recurrent layers, models that see images;
of Llamas with weights in fp8 too."""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import hybrid_shapes
import image_shapes

from kvline_server.model.config import Experts, ModelConfig, Norms
from kvline_server.model.positions import Rope, YarnScaling
from kvline_server.model.quantization import FIELD, Quantization

LLAMA8B = ModelConfig(
    architecture="LlamaForCausalLM",
    layers=32,
    hidden=4096,
    intermediate=14336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocabulary=128256,
    max_position=131072,
    norm_eps=1e-5,
    rope=Rope(500_000.0),
)
QWEN06B = ModelConfig(
    architecture="Qwen3ForCausalLM",
    layers=28,
    hidden=1024,
    intermediate=3072,
    heads=16,
    kv_heads=8,
    head_dim=128,
    vocabulary=151936,
    max_position=40960,
    norm_eps=1e-6,
    rope=Rope(1_000_000.0),
    tied_embeddings=True,
    qk_norm="head",
)
LLAMA70B = replace(LLAMA8B, layers=80, hidden=8192, intermediate=28672, heads=64)
QWEN30B = replace(
    QWEN06B,
    architecture="Qwen3MoeForCausalLM",
    layers=48,
    hidden=2048,
    intermediate=768,
    heads=32,
    kv_heads=4,
    tied_embeddings=False,
    experts=Experts(128, 8, True, "mlp."),
)
GEMMA12B = replace(
    QWEN06B,
    architecture="Gemma3ForCausalLM",
    layers=48,
    hidden=3840,
    intermediate=15360,
    head_dim=256,
    vocabulary=262208,
    max_position=131072,
    windows=(*(1024,) * 5, 0) * 8,
    local_rope=Rope(10_000.0),
    softmax_scale=256**-0.5,
    norms=Norms(
        before_attention="input_layernorm",
        after_attention="post_attention_layernorm",
        before_mlp="pre_feedforward_layernorm",
        after_mlp="post_feedforward_layernorm",
        offset=1.0,
    ),
    activation="gelu_tanh",
    embedding_scale=3840**0.5,
)
_YARN = YarnScaling(32.0, 4096, 0.1 * math.log(32) + 1, truncate=False, longest=131072)


def _experts(count: int = 32, mxfp4: bool = True) -> Experts:
    """gpt-oss'."""
    more: dict[str, Any] = {"router": "router", "stacked": True}
    return Experts(count, 4, True, "mlp.", mxfp4=mxfp4, **more)


GPTOSS20B = replace(
    LLAMA8B,
    architecture="GptOssForCausalLM",
    layers=24,
    hidden=2880,
    intermediate=2880,
    heads=64,
    head_dim=64,
    vocabulary=201088,
    windows=(128, 0) * 12,
    rope=Rope(150_000.0, _YARN),
    experts=_experts(),
    activation="swiglu_oai",
    qkv_bias=True,
    output_bias=True,
    sinks=True,
)
BY_CHANNEL, IN_BLOCKS = Quantization("_scale", None), Quantization("_scale_inv", (128, 128))
SHAPES = {
    "llama8b": LLAMA8B,
    "qwen06b": QWEN06B,
    "llama70b": LLAMA70B,
    "qwen30b": QWEN30B,
    "gemma12b": GEMMA12B,
    "gptoss20b": GPTOSS20B,
    "gptoss20b-bf16": replace(GPTOSS20B, experts=_experts(mxfp4=False)),
    "gptoss120b": replace(GPTOSS20B, layers=36, windows=(128, 0) * 18, experts=_experts(count=128)),
    "llama8b-fp8": replace(LLAMA8B, quantization=BY_CHANNEL),
    "llama8b-fp8-block": replace(LLAMA8B, quantization=IN_BLOCKS),
    "llama70b-fp8": replace(LLAMA70B, quantization=BY_CHANNEL),
    **hybrid_shapes.HYBRIDS,
    **image_shapes.SEEING,
}
ON_ONE_GPU = ("llama8b", "qwen06b")
# The model that one is compared with, and what results call the difference.
TWINS = {
    "llama8b-fp8": ("llama8b", "fp8"),
    "llama8b-fp8-block": ("llama8b", "fp8block"),
}
# A model of another kind whose throughput one is compared with.
BESIDE = {"qwen35-9b": "llama8b", "qwen35-35b": "qwen30b", "gptoss20b": "qwen30b"}
_FP8 = {"num_bits": 8, "type": "float"}
_GROUP = {
    "targets": ["Linear"],
    "weights": _FP8 | {"strategy": "channel", "dynamic": False},
    "input_activations": _FP8 | {"strategy": "token", "dynamic": True},
}
QUANTIZATION_CONFIGS: dict[Quantization, dict[str, Any]] = {
    BY_CHANNEL: {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": _GROUP},
        "ignore": ["lm_head"],
    },
    IN_BLOCKS: {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}


def write_config(name: str, folder: Path) -> Path:
    """config.json of a shape, and of its images, as the model's authors write it."""
    shape = asdict(SHAPES[name])
    body = {
        "architectures": [shape["architecture"]],
        "num_hidden_layers": shape["layers"],
        "hidden_size": shape["hidden"],
        "intermediate_size": shape["intermediate"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "head_dim": shape["head_dim"],
        "vocab_size": shape["vocabulary"],
        "max_position_embeddings": shape["max_position"],
        "rms_norm_eps": shape["norm_eps"],
        "rope_theta": shape["rope"]["theta"],
        "tie_word_embeddings": shape["tied_embeddings"],
        "hidden_act": "silu",
        "attention_bias": False,
        "eos_token_id": None,
        "model_type": "qwen3" if shape["qk_norm"] else "llama",
        "torch_dtype": "bfloat16",
    }
    many = SHAPES[name].experts
    if many is not None and many.stacked:
        body |= _gpt_oss(SHAPES[name], many)
    elif many is not None:
        body |= {
            "model_type": "qwen3_moe",
            "num_experts": many.count,
            "num_experts_per_tok": many.chosen,
            "norm_topk_prob": many.renormalise,
            "moe_intermediate_size": shape["intermediate"],
        }
    if SHAPES[name].local_rope is not None:
        body |= {
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 256,
            "rope_local_base_freq": 10_000.0,
            "sliding_window": max(SHAPES[name].windows),
            "sliding_window_pattern": 6,
        }
        del body["hidden_act"]
    if SHAPES[name].recurrent is not None:
        body |= hybrid_shapes.fields(SHAPES[name])
    if (how := SHAPES[name].quantization) is not None:
        body[FIELD] = QUANTIZATION_CONFIGS[how]
    if name in image_shapes.TOWERS:
        image_shapes.write_processor(name, folder)
        body = image_shapes.whole(name, body)
    (folder / "config.json").write_text(json.dumps(body))
    return folder


def _gpt_oss(model: ModelConfig, many: Experts) -> dict[str, Any]:
    """The fields of config.json that are its own."""
    scaling = model.rope.scaling
    assert isinstance(scaling, YarnScaling)
    body: dict[str, Any] = {
        "model_type": "gpt_oss",
        "attention_bias": True,
        "num_local_experts": many.count,
        "num_experts_per_tok": many.chosen,
        "experts_per_token": many.chosen,
        "swiglu_limit": 7.0,
        "sliding_window": max(model.windows),
        "layer_types": [
            "sliding_attention" if window else "full_attention" for window in model.windows
        ],
        "initial_context_length": scaling.original_max_position,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "truncate": scaling.truncate,
            "original_max_position_embeddings": scaling.original_max_position,
        },
    }
    if many.mxfp4:
        names = ("model.layers.*.self_attn", "model.layers.*.mlp.router")
        excepted = [*names, "model.embed_tokens", "lm_head"]
        body[FIELD] = {"quant_method": "mxfp4", "modules_to_not_convert": excepted}
    return body


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """A byte-level tokenizer with `vocabulary` tokens, so that each id has a text, or that of
    KVLINE_BENCH_TOKENIZER."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    (folder / "tokenizer_config.json").write_text(json.dumps({}))
    if given := os.environ.get("KVLINE_BENCH_TOKENIZER"):
        shutil.copy(given, folder / "tokenizer.json")
        return
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*alphabet, *(f"w{i}" for i in range(vocabulary - len(alphabet)))]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
