"""Rotary frequencies."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import pad

from kvline_server.model.config import Llama3Scaling, LongScaling, Rope


def rotations(rope: Rope, dim: int, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Frequency of each pair of a head's elements, and factor of its cosine and sine; pairs that
    are not rotated come last, with 0 and 1. LongRoPE takes the factors of long contexts if
    `positions`, the served length, is above the original one: for sequences of any length, so that
    a key in the cache stays valid while its sequence grows. float32 [dim / 2], twice"""
    rotary, factor = rope.rotary_dim or dim, 1.0
    exponents = torch.arange(0, rotary, 2, dtype=torch.int64).float() / rotary
    divisors, scaling = rope.theta**exponents, rope.scaling
    if isinstance(scaling, LongScaling):
        long = positions > scaling.original_max_position
        divisors = torch.tensor(scaling.long if long else scaling.short) * divisors
        factor = scaling.attention_factor
    frequencies = 1.0 / divisors / rope.factor
    if isinstance(scaling, Llama3Scaling):
        frequencies = _llama3(frequencies, scaling)
    rest = (0, (dim - rotary) // 2)
    return pad(frequencies, rest), pad(torch.full_like(frequencies, factor), rest, value=1.0)


def _llama3(base: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    wavelengths = 2 * math.pi / base
    low = scaling.original_max_position / scaling.low_freq_factor
    high = scaling.original_max_position / scaling.high_freq_factor
    smooth = (scaling.original_max_position / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    mixed = (1 - smooth) * base / scaling.factor + smooth * base
    scaled = torch.where(wavelengths > low, base / scaling.factor, base)
    return torch.where((wavelengths <= low) & (wavelengths >= high), mixed, scaled)
