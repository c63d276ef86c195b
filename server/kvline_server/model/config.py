"""Reads a model's config.json: supported architectures and options.

An option that would change the computation and is not implemented is rejected by name, before any
weights are read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvline_server.errors import ModelInvalid, ModelNotFound, ModelUnsupported

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)
MAX_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's frequency scaling (Llama 3.1 model card)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    max_position: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def group(self) -> int:
        """Query heads per key-value head."""
        return self.heads // self.kv_heads


def read_json(path: Path, limit: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    if not path.is_file():
        raise ModelNotFound(f"{path}: no such file; a model folder holds config.json")
    if path.stat().st_size > limit:
        raise ModelInvalid(f"{path}: larger than {limit} bytes")
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelInvalid(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelInvalid(f"{path}: expected a JSON object")
    return value


def read_config(folder: Path) -> ModelConfig:
    """The model's configuration, or an error that names the file and the field."""
    path = folder / "config.json"
    raw = read_json(path)
    architecture = _architecture(raw, path)
    refuse_unsupported(raw, path)
    reader = _Reader(raw, path)
    heads = reader.integer("num_attention_heads")
    kv_heads = reader.integer("num_key_value_heads", heads)
    hidden = reader.integer("hidden_size")
    if heads % kv_heads:
        raise ModelInvalid(f"{path}: num_attention_heads {heads} is not a multiple of {kv_heads}")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    qwen2 = architecture == "Qwen2ForCausalLM"
    bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        layers=reader.integer("num_hidden_layers"),
        hidden=hidden,
        intermediate=reader.integer("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=reader.integer("head_dim", hidden // heads),
        vocabulary=reader.integer("vocab_size"),
        max_position=reader.integer("max_position_embeddings"),
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        rope_theta=_Reader(rope, path).number("rope_theta", reader.number("rope_theta", 10000.0)),
        rope_scaling=_rope_scaling(rope, path),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=True if qwen2 else bias,
        output_bias=False if qwen2 else bias,
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        eos_token_ids=_eos_ids(raw, folder),
        bos_token_id=raw.get("bos_token_id") if isinstance(raw.get("bos_token_id"), int) else None,
    )


def _architecture(raw: dict[str, Any], path: Path) -> str:
    listed = raw.get("architectures")
    name = listed[0] if isinstance(listed, list) and listed else None
    if name not in ARCHITECTURES:
        raise ModelUnsupported(
            f"{path}: architectures is {listed!r:.120}; this server runs {', '.join(ARCHITECTURES)}"
        )
    return str(name)


def refuse_unsupported(raw: dict[str, Any], path: Path) -> None:
    if "auto_map" in raw:
        raise ModelUnsupported(
            f"{path}: auto_map asks for code of the repository, which is never run"
        )
    if raw.get("quantization_config"):
        raise ModelUnsupported(f"{path}: quantization_config is not supported; use plain weights")
    window = raw.get("sliding_window")
    if (
        window
        and raw.get("use_sliding_window", True)
        and window < raw.get("max_position_embeddings", 0)
    ):
        raise ModelUnsupported(f"{path}: sliding_window {window} is not supported")
    layers = raw.get("layer_types") or []
    if any(kind != "full_attention" for kind in layers):
        raise ModelUnsupported(f"{path}: layer_types other than full_attention are not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelUnsupported(
            f"{path}: hidden_act {raw['hidden_act']!r} is not supported, silu is"
        )
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelUnsupported(f"{path}: partial_rotary_factor is not supported")


def _rope_scaling(rope: dict[str, Any], path: Path) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ModelUnsupported(f"{path}: rope scaling {kind!r:.40} is not supported, llama3 is")
    reader = _Reader(rope, path)
    return RopeScaling(
        factor=reader.number("factor"),
        low_freq_factor=reader.number("low_freq_factor"),
        high_freq_factor=reader.number("high_freq_factor"),
        original_max_position=reader.integer("original_max_position_embeddings"),
    )


def _eos_ids(raw: dict[str, Any], folder: Path) -> tuple[int, ...]:
    """The union of both files: chat models end a turn with tokens that only generation_config.json
    lists."""
    found: list[int] = []
    generation = folder / "generation_config.json"
    sources = [raw]
    if generation.is_file():
        sources.append(read_json(generation))
    for source in sources:
        value = source.get("eos_token_id")
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, int) and item not in found:
                found.append(item)
    return tuple(found)


class _Reader:
    """Reads positive numbers from a JSON object; errors name the file and the field."""

    def __init__(self, raw: dict[str, Any], path: Path) -> None:
        self.raw = raw
        self.path = path

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise ModelInvalid(
                f"{self.path}: {key}: expected a positive integer, got {value!r:.40}"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.raw.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ModelInvalid(f"{self.path}: {key}: expected a positive number, got {value!r:.40}")
        return float(value)
