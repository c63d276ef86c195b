"""Launches of the gated delta rule's Triton kernels (triton_delta_rule.py)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvline_server.kernels.cubins import TRITON_TYPES, Variant, launch
from kvline_server.kernels.recurrent import CHUNK, DeltaRule, States
from kvline_server.kernels.tiles import SMALL

DIM = 128  # of keys and values: that of every published model
WIDTH = 4  # of the convolution
STATE_TYPES = (torch.float32, torch.bfloat16)
MERGING = "tf32x3"  # of inverses: in tf32 alone errors of 1e-3 come on top of bfloat16's


@dataclass(frozen=True, slots=True)
class FewRows:
    """tiles.Few on the device."""

    spans: torch.Tensor
    slots: torch.Tensor
    sources: torch.Tensor

    def split(self, most: int) -> Iterator[FewRows]:
        """In parts of up to so many sequences."""
        for at in range(0, len(self.slots), most):
            own = slice(at, at + most)
            yield FewRows(self.spans[own], self.slots[own], self.sources[own])


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


ROWS = Shape(32, 4, 1)
TILE_WARPS = {CHUNK: 8, SMALL: 4}
ONE_TILE = {CHUNK: Shape(64, 4, 1), SMALL: Shape(64, 4, 1)}  # a sequence
MANY_TILES = Shape(64, 4, 2)


def check(layer: DeltaRule) -> None:
    """Raises RuntimeError for a layer that the kernels do not compute."""
    if (layer.key_dim, layer.value_dim) != (DIM, DIM):
        sizes = f"{layer.key_dim} by {layer.value_dim}"
        raise RuntimeError(f"a delta rule of heads of {sizes}, kernels support {DIM} by {DIM}")
    if layer.convolution.weight.shape[1] != WIDTH or layer.convolution.bias is not None:
        raise RuntimeError(f"a delta rule whose convolution is not of {WIDTH} rows without a bias")


def rows(
    x: torch.Tensor,
    ba: torch.Tensor,
    layer: DeltaRule,
    states: States,
    few: FewRows,
    done: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Sequences of few rows, one row after the other. `done` is of zeros, one or more for each of
    their key heads, and is zeros again afterwards."""
    heads, sequences = layer.value_heads, len(few.slots)
    launch(
        _rows_variant(x.dtype, layer, states, ROWS),
        sequences * heads * (DIM // ROWS.columns),
        *(x, x.stride(0), ba, ba.stride(0), layer.convolution.weight),
        *(layer.decay.a_log, layer.decay.dt_bias, states.inputs, states.matrices),
        *(out, out.stride(0), few.spans, few.slots, few.sources, done),
        *(layer.key_heads, heads),
    )


def tiled(
    x: torch.Tensor,
    ba: torch.Tensor,
    layer: DeltaRule,
    states: States,
    tiles: Tiles,
    out: torch.Tensor,
) -> None:
    """Sequences in tiles of rows."""
    key_heads, heads, count, size = layer.key_heads, layer.value_heads, len(tiles.tiles), tiles.rows
    qs, ks = (x.new_empty((count, key_heads, size, DIM)) for _ in range(2))
    ws, us = (x.new_empty((count, heads, size, DIM)) for _ in range(2))
    ps = x.new_empty((count, heads, size, size))
    gs = x.new_empty((count, heads, size), dtype=torch.float32)
    launch(
        _tiles_variant(x.dtype, layer, states, size),
        count * key_heads,
        *(x, x.stride(0), ba, ba.stride(0), layer.convolution.weight),
        *(layer.decay.a_log, layer.decay.dt_bias, states.inputs, tiles.tiles, tiles.tile_sources),
        *(qs, ks, ws, us, ps, gs, key_heads, heads),
    )
    shape = MANY_TILES if tiles.most > 1 else ONE_TILE[size]
    launch(
        _pass_variant(x.dtype, states, size, shape),
        len(tiles.sources) * heads * (DIM // shape.columns),
        *(x, x.stride(0), qs, ks, ws, us, ps, gs, states.inputs, states.matrices),
        *(out, out.stride(0), tiles.chains, tiles.sources, tiles.stops, tiles.slots),
        *(key_heads, heads),
    )


def variants(dtype: torch.dtype) -> Iterator[Variant]:
    """All variants that are launched here."""
    for weight, matrices in itertools.product((dtype, torch.float32), STATE_TYPES):
        yield _rows(dtype, weight, dtype, matrices, ROWS)
    for weight, size in itertools.product((dtype, torch.float32), (CHUNK, SMALL)):
        yield _tiles(dtype, weight, dtype, size)
    for matrices, (size, shape) in itertools.product(
        STATE_TYPES, ((CHUNK, MANY_TILES), *ONE_TILE.items())
    ):
        yield _pass(dtype, dtype, matrices, size, shape)


def _rows_variant(dtype: torch.dtype, layer: DeltaRule, states: States, shape: Shape) -> Variant:
    weight = layer.convolution.weight.dtype
    return _rows(dtype, weight, states.inputs.dtype, states.matrices.dtype, shape)


def _tiles_variant(dtype: torch.dtype, layer: DeltaRule, states: States, size: int) -> Variant:
    return _tiles(dtype, layer.convolution.weight.dtype, states.inputs.dtype, size)


def _pass_variant(dtype: torch.dtype, states: States, size: int, shape: Shape) -> Variant:
    return _pass(dtype, states.inputs.dtype, states.matrices.dtype, size, shape)


def _pointers(*kinds: torch.dtype) -> tuple[str, ...]:
    return tuple(f"*{TRITON_TYPES[kind]}" for kind in kinds)


def _rows(
    dtype: torch.dtype,
    weight: torch.dtype,
    inputs: torch.dtype,
    matrices: torch.dtype,
    shape: Shape,
) -> Variant:
    x, filters, old, state = _pointers(dtype, weight, inputs, matrices)
    arguments = (x, "i32", x, "i32", filters, "*fp32", "*fp32", old, state, x, "i32")
    plan = ("*i32", "*i64", "*i64", "*i32", "i32", "i32")
    constants = (("DIM", DIM), ("COLUMNS", shape.columns), ("WIDTH", WIDTH))
    aligned = (0, 1, 4, 7, 8, 9, 10)
    return Variant("delta_rows", (*arguments, *plan), aligned, constants, shape.warps, 1)


def _tiles(dtype: torch.dtype, weight: torch.dtype, inputs: torch.dtype, size: int) -> Variant:
    x, filters, old = _pointers(dtype, weight, inputs)
    arguments = (x, "i32", x, "i32", filters, "*fp32", "*fp32", old, "*i32", "*i64")
    made = (x, x, x, x, x, "*fp32", "i32", "i32")
    constants = {"DIM": DIM, "ROWS": size, "WIDTH": WIDTH, "PRECISION": MERGING}
    aligned = (0, 1, 4, 7, 10, 11, 12, 13, 14, 15)
    given = tuple(constants.items())
    return Variant("delta_tiles", (*arguments, *made), aligned, given, TILE_WARPS[size], 1)


def _pass(
    dtype: torch.dtype, inputs: torch.dtype, matrices: torch.dtype, size: int, shape: Shape
) -> Variant:
    x, old, state = _pointers(dtype, inputs, matrices)
    arguments = (x, "i32", x, x, x, x, x, "*fp32", old, state, x, "i32")
    plan = ("*i32", "*i64", "*i32", "*i64", "i32", "i32")
    constants = {"DIM": DIM, "COLUMNS": shape.columns, "ROWS": size, "WIDTH": WIDTH}
    constants["STAGES"] = shape.stages
    aligned, given = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11), tuple(constants.items())
    return Variant("delta_pass", (*arguments, *plan), aligned, given, shape.warps, shape.stages)
