"""A model as its config.json describes it. Imports no torch: HTTP and the download step read it.

model/families/ has a file for each architecture, which starts from `dense`. An option that changes
the computation and is not implemented is rejected by name, before any weights are read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from kvline_server.errors import ModelInvalid, ModelUnsupported
from kvline_server.model import families, quantization
from kvline_server.model.end_tokens import end_tokens
from kvline_server.model.fields import Fields, read_json
from kvline_server.model.quantization import Quantization


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3's frequency scaling (Llama 3.1 model card)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class LongScaling:
    """LongRoPE (arXiv 2402.13753): a divisor of each frequency, for contexts up to the original
    length and for longer ones, and a factor of all cosines and sines."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_position: int
    attention_factor: float


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding."""

    theta: float
    scaling: Llama3Scaling | LongScaling | None = None
    factor: float = 1.0  # divides every frequency: linear scaling
    rotary_dim: int | None = None  # the first elements of a head, which are rotated; None: all


@dataclass(frozen=True, slots=True)
class Norms:
    """Names of a layer's norms, None where it has none. One after a block is applied before the
    block's output is added to the residual stream."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    offset: float = 0.0  # added to the weights of every norm: 1 where the files hold weight - 1


@dataclass(frozen=True, slots=True)
class Experts:
    """Of a mixture of experts: every MLP is many, of which a router chooses some for each token."""

    count: int
    chosen: int  # for each token
    renormalise: bool  # the weights of the chosen ones add up to 1
    at: str  # of the tensors, after the layer's prefix
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: str
    layers: int
    hidden: int
    intermediate: int  # width of the MLP, or of each expert
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    max_position: int
    norm_eps: float
    rope: Rope
    local_rope: Rope | None = None  # of layers with a window, where theirs is another
    # Of each layer: tokens that a query sees, itself included; 0: all.
    windows: tuple[int, ...] = ()
    softmax_scale: float | None = None  # of query times key; None: 1 / sqrt(head_dim)
    norms: Norms = Norms()
    qk_norm: Literal["", "head", "projection"] = ""  # over each head, or over all heads at once
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")  # tensors; or one that holds all three
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    activation: Literal["silu", "gelu_tanh"] = "silu"
    experts: Experts | None = None
    quantization: Quantization | None = None  # of the weights in the files
    embedding_scale: float = 1.0
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def rope_of(self, layer: int) -> Rope:
        return self.local_rope if self.local_rope and self.window(layer) else self.rope

    @property
    def windowed(self) -> bool:
        """Whether a window hides anything from a sequence of the longest length."""
        return any(0 < window < self.max_position for window in self.windows)


def read_config(folder: Path) -> ModelConfig:
    """The model's configuration, or an error that names the file and the field."""
    path = folder / "config.json"
    fields = Fields(read_json(path), path)
    listed, known = fields.value("architectures"), families.known()
    name = listed[0] if isinstance(listed, list) and listed else None
    if not isinstance(name, str) or name not in known:
        raise ModelUnsupported(
            f"{path}: architectures is {listed!r:.120}; this server runs {', '.join(known)}"
        )
    model: ModelConfig = known[name](fields)
    quantized = quantization.read(fields)
    fields.refuse_unread()
    eos = end_tokens(fields.raw, folder, model.vocabulary)
    return replace(model, architecture=name, eos_token_ids=eos, quantization=quantized)


def dense(fields: Fields, rope: Rope | None = None) -> ModelConfig:
    """What all dense decoders have in common; a family replaces the rest."""
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    hidden = fields.integer("hidden_size")
    if heads % kv_heads:
        raise ModelInvalid(
            f"{fields.path}: num_attention_heads {heads} is not a multiple of {kv_heads}"
        )
    return ModelConfig(
        architecture="",
        layers=fields.integer("num_hidden_layers"),
        hidden=hidden,
        intermediate=fields.integer("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=fields.integer("head_dim", hidden // heads),
        vocabulary=fields.integer("vocab_size"),
        max_position=fields.integer("max_position_embeddings"),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope or read_rope(rope_fields(fields), fields.number("rope_theta", 10000.0)),
        tied_embeddings=fields.flag("tie_word_embeddings"),
    )


def experts(fields: Fields, count: str, renormalise: bool, at: str, **more: Any) -> Experts:
    """`count` is the field of that name."""
    every, chosen = fields.integer(count), fields.integer("num_experts_per_tok")
    if chosen > every:
        raise fields.invalid("num_experts_per_tok", f"at most {count}, {every}")
    return Experts(every, chosen, renormalise, at, **more)


def every_window(fields: Fields) -> tuple[int, ...]:
    """sliding_window, in all layers."""
    window = fields.value("sliding_window") and fields.integer("sliding_window")
    return (window or 0,) * fields.integer("num_hidden_layers")


def rope_fields(fields: Fields) -> Fields:
    """rope_parameters, which older files call rope_scaling."""
    newer, older = fields.section("rope_parameters"), fields.section("rope_scaling")
    return newer if newer.raw else older


def read_rope(scaling: Fields, theta: float) -> Rope:
    """Rotary embedding without scaling, or with linear or Llama 3's; `theta` is of older files,
    which have it elsewhere."""
    theta = scaling.number("rope_theta", theta)
    kind = scaling.value("rope_type", scaling.value("type", "default"))
    scaling.refuse_unread()
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, factor=scaling.number("factor"))
    if kind != "llama3":
        raise ModelUnsupported(f"{scaling.path}: rope scaling {kind!r:.40} is not supported")
    made = Llama3Scaling(
        factor=scaling.number("factor"),
        low_freq_factor=scaling.number("low_freq_factor"),
        high_freq_factor=scaling.number("high_freq_factor"),
        original_max_position=scaling.integer("original_max_position_embeddings"),
    )
    return Rope(theta, made)
