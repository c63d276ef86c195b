"""Rotary position embeddings as config.json describes them. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kvline_server.model import neutral
from kvline_server.model.fields import Fields

SECTIONS, INTERLEAVED = "mrope_section", "mrope_interleaved"
ORIGINAL, PART = "original_max_position_embeddings", "partial_rotary_factor"


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
class YarnScaling:
    """YaRN (arXiv 2309.00071): frequencies that turn often within the original length stay, those
    that turn seldom are divided by `factor`, those between are mixed; and a factor of all cosines
    and sines. It is the same for sequences of every length."""

    factor: float
    original_max_position: int
    attention_factor: float
    beta_fast: float = 32.0  # turns within the original length from which a frequency stays
    beta_slow: float = 1.0  # below which it is divided
    truncate: bool = True  # the mixed pairs begin and end at whole numbers
    longest: int = 0  # tokens: `factor` times the original length, where the file has that


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding."""

    theta: float
    scaling: Llama3Scaling | LongScaling | YarnScaling | None = None
    factor: float = 1.0  # divides every frequency: linear scaling
    rotary_dim: int | None = None  # the first elements of a head, which are rotated; None: all
    # Of each rotated pair, by which position of an image's token it turns: 0 time, 1 row, 2 column.
    # Those of text are one number; where there are no axes, so are those of images.
    axes: tuple[int, ...] = ()


def rope_theta(fields: Fields, default: float) -> float:
    """Of files that do not have it in rope_parameters."""
    return fields.number("rope_theta", default)


def rope_fields(fields: Fields, theta: float) -> Fields:
    """rope_scaling, which replaces rope_parameters where a file has both, as in transformers: it is
    what a user adds to a file. What that would lose is refused; `theta` is the family's default."""
    newer, older = fields.section("rope_parameters"), fields.section("rope_scaling")
    if not older.raw:
        return newer
    for key, usual in (("rope_theta", theta), (PART, 1.0)):
        given = older.raw.get(key) is not None or fields.raw.get(key) is not None
        if not given and newer.value(key, usual) != usual:
            raise newer.unsupported(key, f" beside a rope_scaling without {key}: add it there")
    return older


def read_rope(fields: Fields, scaling: Fields, theta: float) -> Rope:
    """Rotary embedding without scaling, or with linear, Llama 3's or YaRN's; `theta` is that of
    files which have it elsewhere."""
    theta = scaling.number("rope_theta", theta)
    kind = rope_kind(scaling)
    read = SCALINGS.get(kind)
    if read is None:
        key = "rope_type" if "rope_type" in scaling.raw else "type"
        raise scaling.unsupported(key, f"; {', '.join(SCALINGS)} are")
    rope = read(fields, scaling, theta)
    # A part that is rotated is read by the family that has one; `finetuned` is the authors' note,
    # and the original length stays in files whose scaling needs none.
    scaling.refuse_unread(("finetuned", ORIGINAL), {PART: 1.0}, neutral.ROPE_HINTS)
    return rope


def axes_of_images(scaling: Fields, pairs: int, usual: list[int], turns: bool) -> tuple[int, ...]:
    """Rope.axes, of files that say how many pairs turn by each axis. Where the family has the axes
    take `turns`, rows have every third pair from the second on and columns from the third."""
    scaling.only(INTERLEAVED, turns, turns)
    found = scaling.value(SECTIONS, usual)
    whole = isinstance(found, list) and len(found) == 3 and all(type(n) is int for n in found)
    if not whole or min(found) < 0 or (sum(found) != pairs and not turns):
        raise scaling.invalid(SECTIONS, f"three numbers of pairs, {pairs} in all")
    if not turns:
        return tuple(axis for axis, count in enumerate(found) for _ in range(count))
    made = [0] * pairs
    for axis in (1, 2):
        for pair in range(axis, min(pairs, 3 * found[axis]), 3):
            made[pair] = axis
    return tuple(made)


def rope_kind(scaling: Fields) -> str:
    older = scaling.value("type", "default")
    return str(scaling.value("rope_type", older))


def _llama3(fields: Fields, scaling: Fields, theta: float) -> Rope:
    made = Llama3Scaling(
        factor=scaling.number("factor"),
        low_freq_factor=scaling.number("low_freq_factor"),
        high_freq_factor=scaling.number("high_freq_factor"),
        original_max_position=_original_length(fields, scaling),
    )
    return Rope(theta, made)


def _yarn(fields: Fields, scaling: Fields, theta: float) -> Rope:
    if theta <= 1:
        raise scaling.invalid("rope_theta", "more than 1 for YaRN")
    factor = scaling.number("factor")
    scale, all_dim = scaling.value("mscale"), scaling.value("mscale_all_dim")
    usual = _yarn_scale(factor)
    if scale is not None and all_dim is not None:
        scale, all_dim = scaling.number("mscale"), scaling.number("mscale_all_dim")
        usual = _yarn_scale(factor, scale) / _yarn_scale(factor, all_dim)
    original = _original_length(fields, scaling)
    if factor * original >= 2**31:
        raise scaling.invalid("factor", f"with {original} tokens less than 2^31 in all")
    given = scaling.value(ORIGINAL, fields.value(ORIGINAL)) is not None
    made = YarnScaling(
        factor=factor,
        original_max_position=original,
        attention_factor=scaling.number("attention_factor", usual),
        beta_fast=scaling.number("beta_fast", 32),
        beta_slow=scaling.number("beta_slow", 1),
        truncate=scaling.flag("truncate", not scaling.null("truncate")),
        longest=int(factor * original) if given else 0,
    )
    return Rope(theta, made)


def _yarn_scale(factor: float, scale: float = 1.0) -> float:
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


def _original_length(fields: Fields, scaling: Fields) -> int:
    """Beside the scaling or in it; the file's only length where neither is there."""
    own, outer = scaling.value(ORIGINAL), fields.value(ORIGINAL)
    if own is not None and outer is not None and own != outer:
        raise scaling.unsupported(ORIGINAL, f" beside {ORIGINAL} {outer!r:.40}")
    if own is not None:
        return scaling.integer(ORIGINAL)
    return fields.integer(ORIGINAL, fields.integer("max_position_embeddings"))


SCALINGS: dict[str, Callable[[Fields, Fields, float], Rope]] = {
    "default": lambda fields, scaling, theta: Rope(theta),
    "linear": lambda fields, scaling, theta: Rope(theta, factor=scaling.number("factor")),
    "llama3": _llama3,
    "yarn": _yarn,
}
