"""Launches of Mamba2's Triton kernels (triton_scan.py)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from kvline_server.kernels.cubins import Variant, launch
from kvline_server.kernels.cuda_convolution import (
    STATE_TYPES,
    WIDTH,
    FewRows,
    Shape,
    Tiles,
    convolved,
    pointers,
)
from kvline_server.kernels.recurrent import CHUNK, Scan, States
from kvline_server.kernels.tiles import SMALL

DIM, STATE = 64, 128  # of a head: those of Nemotron-H and Granite 4
ROWS = Shape(STATE, 4, 1)
TILE_WARPS = {CHUNK: 4, SMALL: 4}
ONE_TILE = {CHUNK: Shape(STATE, 4, 1), SMALL: Shape(STATE, 4, 1)}  # a sequence
MANY_TILES = Shape(STATE, 4, 3)


def check(layer: Scan) -> None:
    """Raises RuntimeError for a layer that the kernels do not compute."""
    if (layer.head_dim, layer.state_dim) != (DIM, STATE):
        sizes = f"{layer.head_dim} by {layer.state_dim}"
        raise RuntimeError(f"a scan of heads of {sizes}, kernels support {DIM} by {STATE}")
    if layer.convolution.weight.shape[1] != WIDTH:
        raise RuntimeError(f"a scan whose convolution is not of {WIDTH} rows")


def rows(
    x: torch.Tensor,
    dt: torch.Tensor,
    layer: Scan,
    states: States,
    few: FewRows,
    out: torch.Tensor,
) -> None:
    """Sequences of few rows, one row after the other."""
    lines = convolved(x, layer.convolution, states.inputs, few)
    launch(
        _rows(x.dtype, states.matrices.dtype),
        len(few.slots) * layer.heads,
        *(lines, dt, dt.stride(0), layer.decay.a_log, layer.decay.dt_bias, layer.skip),
        *(states.matrices, out, out.stride(0), few.spans, few.slots, few.sources),
        *(layer.heads, layer.groups),
    )


def tiled(
    x: torch.Tensor,
    dt: torch.Tensor,
    layer: Scan,
    states: States,
    tiles: Tiles,
    out: torch.Tensor,
) -> None:
    """Sequences in tiles of rows."""
    heads, groups, count, size = layer.heads, layer.groups, len(tiles.tiles), tiles.rows
    xs = x.new_empty((count, heads, DIM, size))
    bs, cs = (x.new_empty((count, groups, size, STATE)) for _ in range(2))
    ps = x.new_empty((count, groups, size, size))
    ds, gs = (x.new_empty((count, heads, size), dtype=torch.float32) for _ in range(2))
    launch(
        _tiles(*_kinds(x, layer, states), size),
        count * (heads + groups),
        *(x, x.stride(0), dt, dt.stride(0), *_filters(layer)),
        *(states.inputs, tiles.tiles, tiles.tile_sources),
        *(xs, bs, cs, ps, ds, gs, heads, groups),
    )
    shape = MANY_TILES if tiles.most > 1 else ONE_TILE[size]
    launch(
        _pass(x.dtype, states.inputs.dtype, states.matrices.dtype, size, shape),
        len(tiles.sources) * heads,
        *(x, x.stride(0), xs, bs, cs, ps, ds, gs, layer.skip, states.inputs, states.matrices),
        *(out, out.stride(0), tiles.chains, tiles.sources, tiles.stops, tiles.slots),
        *(heads, groups),
    )


def _filters(layer: Scan) -> tuple[torch.Tensor, ...]:
    """Without a bias the kernels read none; any pointer will do."""
    weight, bias = layer.convolution.weight, layer.convolution.bias
    decay = layer.decay.a_log, layer.decay.dt_bias
    return weight, weight if bias is None else bias, *decay


def _kinds(
    x: torch.Tensor, layer: Scan, states: States
) -> tuple[torch.dtype, torch.dtype, bool, torch.dtype]:
    weight = layer.convolution.weight.dtype
    return x.dtype, weight, layer.convolution.bias is not None, states.inputs.dtype


def variants(dtype: torch.dtype) -> Iterator[Variant]:
    """All variants that are launched here."""
    weights = list(itertools.product((dtype, torch.float32), (False, True)))
    for matrices in STATE_TYPES:
        yield _rows(dtype, matrices)
    for (weight, biased), size in itertools.product(weights, (CHUNK, SMALL)):
        yield _tiles(dtype, weight, biased, dtype, size)
    for matrices, (size, shape) in itertools.product(
        STATE_TYPES, ((CHUNK, MANY_TILES), *ONE_TILE.items())
    ):
        yield _pass(dtype, dtype, matrices, size, shape)


def _rows(dtype: torch.dtype, matrices: torch.dtype) -> Variant:
    x, state = pointers(dtype, matrices)
    arguments = ("*fp32", x, "i32", "*fp32", "*fp32", "*fp32", state, x, "i32")
    plan = ("*i32", "*i64", "*i64", "i32", "i32")
    constants = (("DIM", DIM), ("STATE", STATE))
    return Variant("scan_rows", (*arguments, *plan), (0, 6, 7, 8), constants, ROWS.warps, 1)


def _tiles(
    dtype: torch.dtype, weight: torch.dtype, biased: bool, inputs: torch.dtype, size: int
) -> Variant:
    x, filters, old = pointers(dtype, weight, inputs)
    arguments = (x, "i32", x, "i32", filters, filters, "*fp32", "*fp32", old, "*i32", "*i64")
    made = (x, x, x, x, "*fp32", "*fp32", "i32", "i32")
    constants = {"DIM": DIM, "STATE": STATE, "ROWS": size, "WIDTH": WIDTH, "BIASED": int(biased)}
    aligned, given = (0, 1, 4, 5, 8, 11, 12, 13, 14, 15, 16), tuple(constants.items())
    return Variant("scan_tiles", (*arguments, *made), aligned, given, TILE_WARPS[size], 1)


def _pass(
    dtype: torch.dtype, inputs: torch.dtype, matrices: torch.dtype, size: int, shape: Shape
) -> Variant:
    x, old, state = pointers(dtype, inputs, matrices)
    arguments = (x, "i32", x, x, x, x, "*fp32", "*fp32", "*fp32", old, state, x, "i32")
    plan = ("*i32", "*i64", "*i32", "*i64", "i32", "i32")
    constants = {"DIM": DIM, "STATE": STATE, "ROWS": size, "WIDTH": WIDTH}
    constants["STAGES"] = shape.stages
    aligned = (0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12)
    given = tuple(constants.items())
    return Variant("scan_pass", (*arguments, *plan), aligned, given, shape.warps, shape.stages)
