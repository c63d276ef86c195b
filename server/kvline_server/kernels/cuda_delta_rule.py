"""Launches of the gated delta rule's Triton kernels (triton_delta_rule.py)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from kvline_server.kernels.cubins import Variant, launch
from kvline_server.kernels.cuda_convolution import (
    WIDTH,
    FewRows,
    Shape,
    Tiles,
    convolved,
    pointers,
)
from kvline_server.kernels.recurrent import CHUNK, DeltaRule, States
from kvline_server.kernels.tiles import SMALL

DIM = 128  # of keys and values: that of every published model
STATE_TYPES = (torch.float32, torch.bfloat16)  # which are loaded to float32, and stored rounded
MERGING = "bf16x3"  # of inverses: nearer than tf32, and of half the time of tf32x3


ROWS = Shape(64, 2, 1)
LINE_WARPS = {CHUNK: 8, SMALL: 2}
TILE_WARPS = {CHUNK: 4}
# By rows of a tile: sequences of one that small. With CHUNK rows and 32 columns Triton 3.6 makes a
# kernel that reads behind its shared memory: check a new shape with compute-sanitizer.
SHORT = {SMALL: Shape(64, 2, 1)}
ONE_TILE = Shape(64, 4, 1)  # a sequence
MANY_TILES = Shape(64, 4, 3)


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
    out: torch.Tensor,
) -> None:
    """Sequences of few rows, one row after the other."""
    key_heads, heads, weight = layer.key_heads, layer.value_heads, layer.convolution.weight
    lines = convolved(x, layer.convolution, states.inputs, few, (key_heads, key_heads))
    launch(
        _rows(x.dtype, weight.dtype, states.inputs.dtype, states.matrices.dtype),
        len(few.slots) * heads * (DIM // ROWS.columns),
        *(x, x.stride(0), weight, states.inputs, lines),
        *(ba, ba.stride(0), layer.decay.a_log, layer.decay.dt_bias),
        *(states.matrices, out, out.stride(0), few.spans, few.slots, few.sources),
        *(key_heads, heads),
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
    us, weight = x.new_empty((count, heads, size, DIM)), layer.convolution.weight
    launch(
        _lines(x.dtype, weight.dtype, states.inputs.dtype, size),
        count * (2 * key_heads + heads),
        *(x, x.stride(0), weight, states.inputs, tiles.tiles, tiles.tile_sources),
        *(qs, ks, us, key_heads, heads),
    )
    gates = (ba, ba.stride(0), layer.decay.a_log, layer.decay.dt_bias, tiles.tiles)
    if size in SHORT:
        launch(
            _short(x.dtype, states.inputs.dtype, states.matrices.dtype, size),
            count * heads,
            *(x, x.stride(0), *gates, tiles.sources, tiles.slots, qs, ks, us),
            *(states.inputs, states.matrices, out, out.stride(0), key_heads, heads),
        )
        return
    ws, ps = torch.empty_like(us), x.new_empty((count, heads, size, size))
    gs = x.new_empty((count, heads, size), dtype=torch.float32)
    sizes = (key_heads, heads)
    launch(_tiles(x.dtype, size), count * heads, *gates, qs, ks, us, ws, ps, gs, *sizes)
    shape = MANY_TILES if tiles.most > 1 else ONE_TILE
    launch(
        _pass(x.dtype, states.inputs.dtype, states.matrices.dtype, size, shape),
        len(tiles.sources) * heads * (DIM // shape.columns),
        *(x, x.stride(0), qs, ks, ws, us, ps, gs, states.inputs, states.matrices),
        *(out, out.stride(0), tiles.chains, tiles.sources, tiles.stops, tiles.slots),
        *sizes,
    )


def variants(dtype: torch.dtype) -> Iterator[Variant]:
    """All variants that are launched here."""
    for weight, matrices in itertools.product((dtype, torch.float32), STATE_TYPES):
        yield _rows(dtype, weight, dtype, matrices)
    for weight, size in itertools.product((dtype, torch.float32), (CHUNK, SMALL)):
        yield _lines(dtype, weight, dtype, size)
    yield _tiles(dtype, CHUNK)
    for matrices in STATE_TYPES:
        yield _short(dtype, dtype, matrices, SMALL)
        for shape in (ONE_TILE, MANY_TILES):
            yield _pass(dtype, dtype, matrices, CHUNK, shape)


def _rows(
    dtype: torch.dtype, weight: torch.dtype, inputs: torch.dtype, matrices: torch.dtype
) -> Variant:
    x, filters, old, state = pointers(dtype, weight, inputs, matrices)
    arguments = (x, "i32", filters, old, "*fp32", x, "i32", "*fp32", "*fp32", state, x, "i32")
    plan = ("*i32", "*i64", "*i64", "i32", "i32")
    constants = (("DIM", DIM), ("COLUMNS", ROWS.columns), ("WIDTH", WIDTH))
    aligned = (0, 1, 2, 3, 4, 9, 10, 11)
    return Variant("delta_rows", (*arguments, *plan), aligned, constants, ROWS.warps, 1)


def _lines(dtype: torch.dtype, weight: torch.dtype, inputs: torch.dtype, size: int) -> Variant:
    x, filters, old = pointers(dtype, weight, inputs)
    arguments = (x, "i32", filters, old, "*i32", "*i64", x, x, x, "i32", "i32")
    constants = (("DIM", DIM), ("ROWS", size), ("WIDTH", WIDTH))
    return Variant("delta_lines", arguments, (0, 1, 2, 3, 6, 7, 8), constants, LINE_WARPS[size], 1)


def _tiles(dtype: torch.dtype, size: int) -> Variant:
    (x,) = pointers(dtype)
    gates = (x, "i32", "*fp32", "*fp32", "*i32")
    arguments = (*gates, x, x, x, x, x, "*fp32", "i32", "i32")
    constants = (("DIM", DIM), ("ROWS", size), ("PRECISION", MERGING))
    aligned = (5, 6, 7, 8, 9, 10)
    return Variant("delta_tiles", arguments, aligned, constants, TILE_WARPS[size], 1)


def _short(dtype: torch.dtype, inputs: torch.dtype, matrices: torch.dtype, size: int) -> Variant:
    x, old, state = pointers(dtype, inputs, matrices)
    gates = (x, "i32", x, "i32", "*fp32", "*fp32", "*i32", "*i64", "*i64")
    arguments, shape = (*gates, x, x, x, old, state, x, "i32", "i32", "i32"), SHORT[size]
    sizes = (("DIM", DIM), ("COLUMNS", shape.columns), ("ROWS", size), ("WIDTH", WIDTH))
    given = (*sizes, ("PRECISION", MERGING))
    aligned = (0, 1, 9, 10, 11, 12, 13, 14, 15)
    return Variant("delta_short", arguments, aligned, given, shape.warps, shape.stages)


def _pass(
    dtype: torch.dtype, inputs: torch.dtype, matrices: torch.dtype, size: int, shape: Shape
) -> Variant:
    x, old, state = pointers(dtype, inputs, matrices)
    arguments = (x, "i32", x, x, x, x, x, "*fp32", old, state, x, "i32")
    plan = ("*i32", "*i64", "*i32", "*i64", "i32", "i32")
    constants = {"DIM": DIM, "COLUMNS": shape.columns, "ROWS": size, "WIDTH": WIDTH}
    constants["STAGES"] = shape.stages
    aligned, given = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11), tuple(constants.items())
    return Variant("delta_pass", (*arguments, *plan), aligned, given, shape.warps, shape.stages)
