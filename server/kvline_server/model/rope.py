"""Rotary tables."""

from __future__ import annotations

import math

import torch

from kvline_server.model.positions import Llama3Scaling, LongScaling, Rope, YarnScaling


def cos_sin(rope: Rope, dim: int, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every position's angle of each pair of a head's elements that are rotated. LongRoPE takes
    the factors of long contexts if `positions`, the served length, is above the original one: for
    sequences of any length, so that a key in the cache stays valid while its sequence grows.
    float32 [positions, pairs], twice"""
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
    if isinstance(scaling, YarnScaling):
        frequencies = _yarn(frequencies, scaling, rope.theta)
        factor = scaling.attention_factor
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    return angles.cos() * factor, angles.sin() * factor


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


def _yarn(base: torch.Tensor, scaling: YarnScaling, theta: float) -> torch.Tensor:
    """base [pairs]: pair i turns original_max_position / (2 pi) * theta^(-i / pairs) times within
    the original length."""
    pairs, original = len(base), scaling.original_max_position

    def pair(turns: float) -> float:
        return pairs * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    if first == last:
        last += 0.001  # as in transformers: a step instead of a division by zero
    ramp = ((torch.arange(pairs, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return base / scaling.factor * ramp + base * (1 - ramp)
