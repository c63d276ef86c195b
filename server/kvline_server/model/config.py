"""A model as its config.json describes it. Imports no torch: HTTP and the download step read it.

model/families/ has a file for each architecture, which starts from `dense`. An option that changes
the computation and is not implemented is rejected by name, before any weights are read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from kvline_server.errors import ModelInvalid, ModelUnsupported
from kvline_server.model import families, hybrid, neutral, quantization
from kvline_server.model.end_tokens import end_tokens
from kvline_server.model.fields import Fields, read_json
from kvline_server.model.positions import Rope, YarnScaling, read_rope, rope_fields, rope_theta
from kvline_server.model.quantization import MXFP4_BLOCK, Mxfp4, Quantization
from kvline_server.model.sequence import Block, Kind
from kvline_server.model.towers import text_of

LOCAL, GLOBAL = "sliding_attention", "full_attention"  # in layer_types


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
class Names:
    """Of tensors, where families differ."""

    decoder: str = "model."  # before all but the LM head's
    others: tuple[str, ...] = ()  # that stand for it in some files
    embedding: str = "embed_tokens"
    norm: str = "norm"  # the last one
    attention: str = "self_attn."  # after the layer's prefix
    mlp: str = "mlp."  # so is this
    down: str = "down_proj"  # of an MLP

    def found(self, has: Callable[[str], bool]) -> Names:
        """As they are in files that have a tensor of each name for which this is true."""
        every = (self.decoder, *self.others)
        there = (at for at in every if has(f"{at}{self.embedding}.weight"))
        return replace(self, decoder=next(there, self.decoder))


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """An MLP beside a mixture's experts, which every token has."""

    width: int
    at: str  # of the tensors, after the layer's prefix
    gate: str = ""  # after the layer's prefix: a projection, whose sigmoid it is multiplied by


@dataclass(frozen=True, slots=True)
class Experts:
    """Of a mixture of experts: every MLP is many, of which a router chooses some for each token."""

    count: int
    chosen: int  # for each token
    renormalise: bool  # the weights of the chosen ones add up to 1
    at: str  # of the tensors, after the layer's prefix
    names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")  # without a gate two
    router: str = "gate"  # its name after `at`
    # All experts are in one tensor, the rows of gate and up by turns: gate_up_proj and down_proj.
    # They have biases, and so has the router.
    stacked: bool = False
    mxfp4: bool = False  # with weights of 4 bits in the files
    # Two tensors of all experts in the place of those of each, gate's rows before up's: where a
    # file has them, or always where an expert's have no names.
    together: tuple[str, str] | None = None
    transposes: bool = False  # some files have these with an expert's inputs before its outputs
    width: int = 0  # of each; 0: the model's
    latent: int = 0  # what a token is projected to for them, and their sum back; 0: as it is
    shared: SharedExpert | None = None
    scores: Literal["softmax", "sigmoid"] = "softmax"  # of the router's logits
    # A number for each expert, of this name after `at`, that is added to its score to choose, and
    # not to weigh it; empty: none.
    choice_bias: str = ""
    scale: float = 1.0  # of the sum of the chosen ones


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: str
    layers: int  # of the file
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
    # Of each layer its blocks, in order; none: attention, then an MLP or experts, in each.
    kinds: tuple[tuple[Kind, ...], ...] = ()
    recurrent: hybrid.DeltaRule | hybrid.Mamba2 | None = None  # of all recurrent layers
    names: Names = Names()
    # Of each layer: tokens that a query sees, itself included; 0: all.
    windows: tuple[int, ...] = ()
    softmax_scale: float | None = None  # of query times key; None: 1 / sqrt(head_dim)
    norms: Norms = Norms()
    qk_norm: Literal["", "head", "projection"] = ""  # over each head, or over all heads at once
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")  # tensors; or one that holds all three
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    # relu2 is of up alone: such MLPs have no gate, and `gate_up` names one tensor.
    activation: Literal["silu", "gelu_tanh", "swiglu_oai", "relu2"] = "silu"
    experts: Experts | None = None
    quantization: Quantization | None = None  # of fp8 weights in the files
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what each block adds to the residual stream
    logits_divisor: float = 1.0
    rotates: bool = True  # queries and keys, by their positions
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    output_gate: bool = False  # sigmoid of a projection beside the queries', times attention
    mlp_bias: bool = False
    left_out: tuple[str, ...] = ()  # before the names of tensors that files have for nothing
    drafts: str = ""  # before the names of a draft head's tensors; empty: none is run
    draft_head: bool = False  # whether it is loaded
    sinks: bool = False  # a logit of each head, in its softmax, without a value
    eos_token_ids: tuple[int, ...] = ()  # `read` gives those of the class, for files without any

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    def rope_of(self, layer: int) -> Rope:
        return self.local_rope if self.local_rope and self.window(layer) else self.rope

    @property
    def blocks(self) -> tuple[Block, ...]:
        """All of them, in order."""
        usual = Kind.ATTENTION, Kind.MLP if self.experts is None else Kind.EXPERTS
        kinds = self.kinds or (usual,) * self.layers
        return tuple(Block(kind, layer) for layer, own in enumerate(kinds) for kind in own)

    @property
    def mixers(self) -> tuple[Block, ...]:
        """Those that have a memory of each sequence, in order."""
        return tuple(block for block in self.blocks if block.kind.mixes)

    @property
    def attentions(self) -> dict[int, int]:
        """Of those mixers that are attention: from which of them it is to its layer, in order."""
        found = enumerate(self.mixers)
        return {at: block.layer for at, block in found if block.kind is Kind.ATTENTION}

    @property
    def expert_width(self) -> int:
        """Of each expert."""
        return (self.experts and self.experts.width) or self.intermediate

    @property
    def widths(self) -> tuple[int, ...]:
        """Of MLPs and experts, which ranks divide; each once."""
        found, kinds = [], {block.kind for block in self.blocks}
        if Kind.MLP in kinds:
            found.append(self.intermediate)
        if Kind.EXPERTS in kinds and self.experts is not None:
            found.append(self.expert_width)
            found += [self.experts.shared.width] if self.experts.shared else []
        return tuple(dict.fromkeys(found))

    @property
    def every_window(self) -> tuple[int, ...]:
        """Of each attention, 0 for none."""
        return tuple(self.window(layer) for layer in self.attentions.values())


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
    family = known[name]
    beside = families.beside(family)
    towered = beside is not None and beside.architecture == name
    text = text_of(fields, beside) if beside is not None and towered else fields
    # transformers takes the class, and with it the defaults, by this name.
    text.only("model_type", family.MODEL_TYPE, family.MODEL_TYPE)
    model: ModelConfig = family.read(text)
    if beside is not None and towered:
        decoder, *others = beside.decoders
        names = replace(model.names, decoder=decoder, others=tuple(others))
        model = replace(model, names=names, left_out=(*beside.towers, *model.left_out))
    model = _quantized(fields, model)
    _refuse_other_windows(text, model)
    for each in (text, fields):
        each.refuse_unread(neutral.IGNORED, neutral.NEUTRAL, neutral.HINTS)
    eos = end_tokens(text, folder, model.vocabulary)
    if not eos and "eos_token_id" not in text.raw:
        eos = tuple(id for id in model.eos_token_ids if id < model.vocabulary)
    return replace(model, architecture=name, eos_token_ids=eos)


def _quantized(fields: Fields, model: ModelConfig) -> ModelConfig:
    """With the format that the files have weights in."""
    found, many = quantization.read(fields, model.layers), model.experts
    in_one = many is not None and many.stacked
    if found is not None and in_one != isinstance(found, Mxfp4):
        hint = ", 'mxfp4' is" if in_one else ": gpt-oss alone is served in MXFP4"
        raise fields.section(quantization.FIELD).unsupported("quant_method", hint)
    if not isinstance(found, Mxfp4):
        return replace(model, quantization=found)
    assert many is not None
    for key, size in (("hidden_size", model.hidden), ("intermediate_size", model.intermediate)):
        if size % MXFP4_BLOCK:
            raise fields.invalid(key, f"a multiple of {MXFP4_BLOCK}, which MXFP4 has scales for")
    return replace(model, experts=replace(many, mxfp4=True))


def dense(
    fields: Fields,
    rope: Rope | None = None,
    *,
    layers: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    theta: float = 10000.0,
    eps: float = 1e-6,
    tied: bool = False,
    width: str = "intermediate_size",
) -> ModelConfig:
    """What all dense decoders have in common; a family replaces the rest. A field that is absent
    has the default of the family's class in transformers, which is given here; None: derived.
    Sizes that no class can know are required."""
    heads, hidden = fields.integer("num_attention_heads"), fields.integer("hidden_size")
    if fields.null("num_key_value_heads"):
        kv_heads = None
    kv_heads = fields.integer("num_key_value_heads", kv_heads or heads)
    if heads % kv_heads:
        raise ModelInvalid(
            f"{fields.path}: num_attention_heads {heads} is not a multiple of "
            f"num_key_value_heads {kv_heads}"
        )
    rope = rope or read_rope(fields, rope_fields(fields, theta), rope_theta(fields, theta))
    return ModelConfig(
        architecture="",
        layers=layers or fields.integer("num_hidden_layers"),
        hidden=hidden,
        intermediate=fields.integer(width),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=fields.integer("head_dim", head_dim or hidden // heads),
        vocabulary=fields.integer("vocab_size"),
        max_position=_longest(fields.integer("max_position_embeddings"), rope),
        norm_eps=fields.number("rms_norm_eps", eps),
        rope=rope,
        tied_embeddings=fields.flag("tie_word_embeddings", tied),
    )


def _longest(given: int, rope: Rope) -> int:
    """YaRN is added to files whose max_position_embeddings stays that of the training, with the
    original length in it. Without, the length of the file may be the raised one already."""
    return max(given, rope.scaling.longest) if isinstance(rope.scaling, YarnScaling) else given


def experts(fields: Fields, count: str, renormalise: bool, at: str, **more: Any) -> Experts:
    """`count` is the field of that name."""
    every, chosen = fields.integer(count), fields.integer("num_experts_per_tok")
    if chosen > every:
        raise fields.invalid("num_experts_per_tok", f"at most {count}, {every}")
    return Experts(every, chosen, renormalise, at, **more)


def every_window(fields: Fields, default: int = 0) -> tuple[int, ...]:
    """sliding_window, in all layers; null is none."""
    if fields.value("sliding_window") is not None:
        window = fields.integer("sliding_window")
    else:
        window = 0 if fields.null("sliding_window") else default
    return (window,) * fields.integer("num_hidden_layers")


def kinds_of_layers(fields: Fields, usual: list[str]) -> list[str]:
    """layer_types, or `usual` where the file has none."""
    kinds = fields.value("layer_types", usual)
    layers = len(usual)
    if (
        not isinstance(kinds, list)
        or [kind in (LOCAL, GLOBAL) for kind in kinds] != [True] * layers
    ):
        raise fields.invalid("layer_types", f"{LOCAL} or {GLOBAL} for {layers} layers")
    return kinds


def _refuse_other_windows(fields: Fields, model: ModelConfig) -> None:
    """In families whose reference has no windows, or has them in every layer."""
    window = fields.raw.get("sliding_window")
    unread = "sliding_window" not in fields.read and fields.raw.get("use_sliding_window", True)
    if unread and window and fields.integer("sliding_window") < model.max_position:
        raise fields.unsupported("sliding_window")
    fields.read.add("sliding_window")
    if "layer_types" in fields.read:
        return
    kinds = [LOCAL if model.window(layer) else GLOBAL for layer in range(model.layers)]
    if fields.value("layer_types", kinds) != kinds:
        raise fields.unsupported("layer_types", f", {kinds[0]} in every layer is")
