"""Qwen2 and Qwen2.5: biases of query, key and value, and where asked for a sliding window in the
upper layers."""

from __future__ import annotations

from dataclasses import replace

from kvline_server.model.config import GLOBAL, LOCAL, ModelConfig, dense, kinds_of_layers
from kvline_server.model.fields import Fields

ARCHITECTURE = "Qwen2ForCausalLM"
MODEL_TYPE = "qwen2"


def read(fields: Fields) -> ModelConfig:
    fields.flag("attention_bias")  # the class does not read it: what has biases is fixed
    return replace(dense(fields, kv_heads=32), qkv_bias=True, windows=upper_windows(fields))


def upper_windows(fields: Fields, first: int = 28) -> tuple[int, ...]:
    """Each layer's: by layer_types, or from max_window_layers on, the `first` one by default."""
    layers = fields.integer("num_hidden_layers")
    first = fields.value("max_window_layers", first)
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise fields.invalid("max_window_layers", "a number of layers")
    windowed = fields.flag("use_sliding_window") and not fields.null("sliding_window")
    usual = [LOCAL if windowed and layer >= first else GLOBAL for layer in range(layers)]
    window = fields.integer("sliding_window", 4096)
    kinds = kinds_of_layers(fields, usual)
    if LOCAL in kinds and not windowed:
        raise fields.unsupported("layer_types", " without use_sliding_window and sliding_window")
    return tuple(window if kind == LOCAL else 0 for kind in kinds) if LOCAL in kinds else ()
