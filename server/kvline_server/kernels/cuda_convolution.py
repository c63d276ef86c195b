"""The convolution of few rows, and what the launches of our recurrent kernels share."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvline_server.kernels.cubins import TRITON_TYPES, Variant, launch
from kvline_server.kernels.recurrent import Convolution

WIDTH = 4  # rows of the convolution: those of every published model
LINE = 128  # channels
LINES = (2, 1)  # of a program
WARPS = 1


@dataclass(frozen=True, slots=True)
class FewRows:
    """tiles.Few on the device."""

    spans: torch.Tensor
    slots: torch.Tensor
    sources: torch.Tensor


@dataclass(frozen=True, slots=True)
class Tiles:
    """tiles.Tiled on the device."""

    rows: int
    most: int
    tiles: torch.Tensor
    tile_sources: torch.Tensor
    chains: torch.Tensor
    sources: torch.Tensor
    stops: torch.Tensor
    slots: torch.Tensor


@dataclass(frozen=True, slots=True)
class Shape:
    """How a program computes: columns of a state, warps, stages of loads."""

    columns: int
    warps: int
    stages: int


def convolved(
    x: torch.Tensor,
    convolution: Convolution,
    inputs: torch.Tensor,
    few: FewRows,
    heads: tuple[int, int] = (0, 0),
) -> torch.Tensor:
    """silu of the convolution of sequences of few rows, whose inputs in their slots it updates.
    `heads` are those of queries and keys, whose channels alone are convolved where there are any;
    they get a length of 1.
    x [rows, channels] -> float32 [rows, channels], undefined in rows of no sequence"""
    channels, bias = LINE * sum(heads) or x.shape[1], convolution.bias
    made = torch.empty((len(x), channels), dtype=torch.float32, device=x.device)
    weight, lines = convolution.weight, channels // LINE
    # Without a bias the kernel reads none; any pointer will do.
    filters = (weight, weight if bias is None else bias)
    each = next(n for n in LINES if lines % n == 0)
    launch(
        _variant(x.dtype, weight.dtype, bias is not None, inputs.dtype, each),
        len(few.slots) * (lines // each),
        *(x, x.stride(0), *filters, inputs, made, few.spans, few.slots, few.sources),
        *(x.shape[1] // LINE, lines, *heads),
    )
    return made


def variants(dtype: torch.dtype) -> Iterator[Variant]:
    """All variants that are launched here."""
    kinds = itertools.product((dtype, torch.float32), (False, True), LINES)
    for weight, biased, lines in kinds:
        yield _variant(dtype, weight, biased, dtype, lines)


def pointers(*kinds: torch.dtype) -> tuple[str, ...]:
    return tuple(f"*{TRITON_TYPES[kind]}" for kind in kinds)


def _variant(
    dtype: torch.dtype, weight: torch.dtype, biased: bool, inputs: torch.dtype, lines: int
) -> Variant:
    x, filters, old = pointers(dtype, weight, inputs)
    arguments = (x, "i32", filters, filters, old, "*fp32", "*i32", "*i64", "*i64")
    constants = (("DIM", LINE), ("LINES", lines), ("WIDTH", WIDTH), ("BIASED", int(biased)))
    kinds = (*arguments, "i32", "i32", "i32", "i32")
    return Variant("convolve_rows", kinds, (0, 1, 2, 3, 4, 5), constants, WARPS, 1)
