"""Tiny models of each family, made by the library whose answers are the reference."""

from __future__ import annotations

import functools
import gc
import json
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 307  # no power of two, larger than the bytes
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 257,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
}


def longrope(dim: int, trained: int) -> dict[str, Any]:
    """Phi-3's configuration for `dim` rotated elements a head; head_dim is not its field."""
    scaling = {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * i for i in range(dim // 2)],
        "long_factor": [1.5 + 0.7 * i for i in range(dim // 2)],
    }
    return PHI3 | {"rope_parameters": scaling, "original_max_position_embeddings": trained}


# Wide enough for scores that differ from one key to another, so that what changes them shows.
WIDE = {"initializer_range": 0.3}
PHI3: dict[str, Any] = WIDE | {"head_dim": 16, "hidden_size": 96}
MOE: dict[str, Any] = WIDE | {"num_experts": 11, "num_experts_per_tok": 3}
# Of sizes that MXFP4's blocks divide, on two ranks too. Prompts are under, at and over the window.
GPT_OSS: dict[str, Any] = WIDE | {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "rope_parameters": YARN_ROPE | {"truncate": False},
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    # Wide enough for the GEMMs of real models: oneDNN has another for less than 512 columns.
    "wide": ("Llama", {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}),
    # Of which two, three and four ranks can each have a share.
    "shared": (
        "Llama",
        {"num_attention_heads": 24, "num_key_value_heads": 12, "intermediate_size": 96},
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"use_sliding_window": False}),
    "qwen2-window": (
        "Qwen2",
        WIDE | {"use_sliding_window": True, "sliding_window": 21, "max_window_layers": 1},
    ),
    # Prompts of the tests are longer than what it was trained for.
    "yarn": ("Qwen3", WIDE | {"max_position_embeddings": 64, "rope_parameters": YARN_ROPE}),
    "qwen3": ("Qwen3", {"use_sliding_window": False}),
    # For what comes behind the last layer, whose tests run thousands of steps.
    "qwen3-shallow": ("Qwen3", {"use_sliding_window": False, "num_hidden_layers": 1}),
    "mistral-window": ("Mistral", WIDE | {"sliding_window": 21}),
    "phi3": ("Phi3", PHI3 | {"sliding_window": 21}),
    # Of the reference the first takes the short factors for all of our prompts, the other the long.
    "phi3-short": ("Phi3", longrope(16, 256)),
    "phi3-long": ("Phi3", longrope(16, 4)),
    "phi4-mini": ("Phi3", longrope(12, 4) | {"partial_rotary_factor": 0.75}),
    "gemma3": (
        "Gemma3Text",
        {
            "num_hidden_layers": 4,
            "sliding_window": 21,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 20,
            "rope_parameters": GEMMA3_ROPE,
        },
    ),
    "olmo2": ("Olmo2", WIDE),
    "qwen3-moe": ("Qwen3Moe", MOE | {"moe_intermediate_size": 24, "norm_topk_prob": True}),
    "qwen3-moe-plain": ("Qwen3Moe", MOE | {"moe_intermediate_size": 24, "norm_topk_prob": False}),
    "mixtral": ("Mixtral", MOE | {"num_local_experts": 6, "sliding_window": None}),
    "gpt-oss": ("GptOss", GPT_OSS),
}
# Of a head's four pairs two turn by an image's time, one by its row and one by its column.
AXES: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
# Text models beside a tower for images.
TOWERED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-vl": ("Qwen3VL", WIDE | {"rope_parameters": AXES}),
    "qwen3-vl-moe": ("Qwen3VLMoe", MOE | {"moe_intermediate_size": 20, "rope_parameters": AXES}),
    "qwen2.5-vl": ("Qwen2_5_VL", WIDE | {"rope_parameters": AXES}),
    "gemma3-vl": ("Gemma3", FAMILIES["gemma3"][1]),
}
QWEN_TOWER: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 4,
    "patch_size": 4,
    "out_hidden_size": 48,
}
TOWER = QWEN_TOWER | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
SIGLIP: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "patch_size": 4,
    "image_size": 32,
    "vision_use_head": False,
}
TOWERS = {"qwen2.5-vl": QWEN_TOWER, "gemma3-vl": SIGLIP}  # of others TOWER


def build(family: str) -> Any:
    """A model of transformers with a family's configuration."""
    transformers = _transformers()
    architecture, extra = (FAMILIES | TOWERED)[family]
    own, kind = SMALL | extra, "CausalLM"
    if family in TOWERED:
        tower = TOWERS.get(family, TOWER)
        own, kind = {"text_config": own, "vision_config": tower}, "ConditionalGeneration"
    config = getattr(transformers, f"{architecture}Config")(**own)
    return getattr(transformers, f"{architecture.removesuffix('Text')}For{kind}")(config)


def make(folder: Path, family: str, sharded: bool) -> Path:
    extra = (FAMILIES | TOWERED)[family][1]
    torch.manual_seed(7)
    model = build(family).to(torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, extra.get("initializer_range", 0.08))
            if name.endswith("sinks"):  # far from 0, so that they show
                parameter.normal_(1, 3)
    model.save_pretrained(folder, max_shard_size="40KB" if sharded else "5GB")
    return folder


@functools.cache
def _transformers() -> Any:
    """What it imports stays: engines collect garbage as they measure, and would visit all of it."""
    import transformers

    gc.collect()
    gc.freeze()
    return transformers


def reference(folder: Path) -> torch.nn.Module:
    transformers = _transformers()
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    model: Any = getattr(transformers, name).from_pretrained(folder, dtype=torch.float32)
    assert isinstance(model, torch.nn.Module)
    return model


def write_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|start|>", special=True)])
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
    )
    settings = {"bos_token": "<|start|>", "eos_token": "<|end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
