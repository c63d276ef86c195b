"""Recurrent layers as config.json describes them: those of hybrid models, which have them in the
place of attention in most layers. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from kvline_server.model.fields import LARGEST, Fields
from kvline_server.model.sequence import Kind

FLOAT32 = "float32"
LINEAR, FULL = "linear_attention", "full_attention"  # in lists of layers
MIXERS = {
    LINEAR: Kind.RECURRENT,
    FULL: Kind.ATTENTION,
    "mamba": Kind.RECURRENT,
    "attention": Kind.ATTENTION,
}


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """Of Qwen3-Next and Qwen3.5."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int = 4  # of the convolution
    gate: Literal["silu", "sigmoid"] = "silu"  # of the norm behind it
    # Two tensors, in_proj_qkvz and in_proj_ba, with the rows of one key head after the other's
    # (Qwen3-Next); else four, in_proj_qkv, _z, _b and _a, with all queries first.
    by_key_head: bool = False

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    def divides(self, ranks: int) -> bool:
        """Whether so many ranks have equal shares: key heads with their value heads."""
        return self.key_heads % ranks == 0

    @property
    def heads_text(self) -> str:
        """Of which ranks have shares, for a message."""
        return f"{self.key_heads} key heads"

    def share(self, ranks: int) -> DeltaRule:
        """Of each of so many ranks."""
        heads = self.key_heads // ranks, self.value_heads // ranks
        return replace(self, key_heads=heads[0], value_heads=heads[1])

    @property
    def inputs(self) -> tuple[int, int]:
        """Of the convolution, in a state."""
        return self.width - 1, 2 * self.keys + self.values

    @property
    def matrices(self) -> tuple[int, int, int]:
        """In a state."""
        return self.value_heads, self.key_dim, self.value_dim


@dataclass(frozen=True, slots=True)
class Mamba2:
    """Of Nemotron-H and Granite 4."""

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    at: str  # of the tensors, after the layer's prefix
    width: int = 4  # of the convolution
    convolution_bias: bool = True
    bias: bool = False  # of the projections

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    def divides(self, ranks: int) -> bool:
        """Whether so many ranks have equal shares: heads, and their groups. One group is on every
        rank."""
        return self.heads % ranks == 0 and (self.groups == 1 or self.groups % ranks == 0)

    @property
    def heads_text(self) -> str:
        """Of which ranks have shares, for a message; those of one group are independent."""
        return f"{self.heads} heads" + (f" in {self.groups} groups" if self.groups > 1 else "")

    def share(self, ranks: int) -> Mamba2:
        """Of each of so many ranks."""
        groups = 1 if self.groups == 1 else self.groups // ranks
        return replace(self, heads=self.heads // ranks, groups=groups)

    @property
    def inputs(self) -> tuple[int, int]:
        """Of the convolution, in a state."""
        return self.width - 1, self.inner + 2 * self.groups * self.state_dim

    @property
    def matrices(self) -> tuple[int, int, int]:
        """In a state."""
        return self.heads, self.head_dim, self.state_dim


def served_in_bfloat16(layers: DeltaRule | Mamba2 | None) -> bool:
    """Whether the error of their states stays bounded where these are rounded to bfloat16. A delta
    rule corrects what its state answers; what a scan adds up is only ever decayed, and in bfloat16
    a decay above 1 - 2^-9 is rounded away (docs/decisions/060)."""
    return isinstance(layers, DeltaRule)


def mixers(fields: Fields, key: str, usual: list[str]) -> list[Kind]:
    """Each layer's, by the field of that name, or `usual` where the file has none. One of them at
    least must be attention: the KV cache has the tokens of requests."""
    names = fields.value(key, usual)
    if not isinstance(names, list) or len(names) != len(usual):
        raise fields.invalid(key, f"a list of {len(usual)} layers")
    if any(not isinstance(name, str) or name not in MIXERS for name in names):
        raise fields.invalid(key, f"{', '.join(MIXERS)}")
    kinds = [MIXERS[name] for name in names]
    if Kind.ATTENTION not in kinds:
        raise fields.unsupported(key, " without a layer of attention")
    return kinds


def recurs(kinds: tuple[tuple[Kind, ...], ...]) -> bool:
    """Whether a layer does."""
    return any(Kind.RECURRENT in own for own in kinds)


def delta_rule(fields: Fields, by_key_head: bool) -> DeltaRule:
    """With the defaults of Qwen3-Next's and Qwen3.5's classes."""
    keys = fields.integer("linear_num_key_heads", 16)
    values = fields.integer("linear_num_value_heads", 32)
    if values % keys:
        raise fields.invalid("linear_num_value_heads", f"a multiple of the {keys} key heads")
    gate = fields.value("output_gate_type", "swish")
    if gate not in ("swish", "silu", "sigmoid"):  # the first two are one
        raise fields.unsupported("output_gate_type", "; swish, silu, sigmoid are")
    fields.only("hidden_act", "silu", "silu")  # of the convolution
    fields.only("mamba_ssm_dtype", FLOAT32, FLOAT32)
    return DeltaRule(
        key_heads=keys,
        value_heads=values,
        key_dim=fields.integer("linear_key_head_dim", 128),
        value_dim=fields.integer("linear_value_head_dim", 128),
        width=fields.integer("linear_conv_kernel_dim", 4),
        gate="sigmoid" if gate == "sigmoid" else "silu",
        by_key_head=by_key_head,
    )


def nemotron(fields: Fields) -> Mamba2:
    """With the defaults of Nemotron-H's class, which reads neither `expand` nor
    `mamba_proj_bias`."""
    fields.only("mamba_hidden_act", "silu", "silu")
    fields.only("mamba_ssm_cache_dtype", FLOAT32, FLOAT32)
    _unbounded(fields)
    return _grouped(
        fields,
        Mamba2(
            heads=fields.integer("mamba_num_heads", 128),
            head_dim=fields.integer("mamba_head_dim", 64),
            groups=fields.integer("n_groups", 8),
            state_dim=fields.integer("ssm_state_size", 128),
            at="mixer.",
            width=fields.integer("conv_kernel", 4),
            convolution_bias=fields.flag("use_conv_bias", True),
            bias=fields.flag("use_bias"),
        ),
        "n_groups",
    )


def granite(fields: Fields) -> Mamba2:
    """With the defaults of Granite 4's class."""
    inner = fields.integer("mamba_expand", 2) * fields.integer("hidden_size")
    heads = fields.integer("mamba_n_heads", 128)
    if inner % heads:
        raise fields.invalid("mamba_n_heads", f"a divisor of {inner}, mamba_expand x hidden_size")
    given = fields.value("mamba_d_head", "auto")
    if given != "auto" and fields.integer("mamba_d_head") * heads != inner:
        raise fields.invalid(
            "mamba_d_head",
            f"{inner // heads}, {inner} (mamba_expand x hidden_size) over mamba_n_heads",
        )
    _unbounded(fields)
    return _grouped(
        fields,
        Mamba2(
            heads=heads,
            head_dim=inner // heads,
            groups=fields.integer("mamba_n_groups", 1),
            state_dim=fields.integer("mamba_d_state", 256),
            at="mamba.",
            width=fields.integer("mamba_d_conv", 4),
            convolution_bias=fields.flag("mamba_conv_bias", not fields.null("mamba_conv_bias")),
            bias=fields.flag("mamba_proj_bias"),
        ),
        "mamba_n_groups",
    )


def _grouped(fields: Fields, made: Mamba2, key: str) -> Mamba2:
    if made.heads % made.groups:
        raise fields.invalid(key, f"a divisor of the {made.heads} heads")
    return made


def _unbounded(fields: Fields) -> None:
    """time_step_limit clamps in some implementations of prompts, and in none of decoding.
    transformers 5 writes infinity as an object."""
    limit = fields.value("time_step_limit", [0.0, math.inf])
    served = limit == [0.0, {"__float__": "Infinity"}]
    if isinstance(limit, list) and len(limit) == 2 and not served:
        served = limit[0] == 0 and isinstance(limit[1], float) and limit[1] > LARGEST
    if not served:
        raise fields.unsupported("time_step_limit", ", from 0 to infinity is")
