"""Launches of Mamba2's Triton kernels (triton_scan.py)."""

from __future__ import annotations

import itertools
import math
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
from kvline_server.kernels.recurrent import CHUNK, Scan, States
from kvline_server.kernels.tiles import SMALL

DIM, STATE = 64, 128  # of a head: those of Nemotron-H and Granite 4
MATRICES = torch.float32  # in bfloat16 what a scan adds up grows without end (docs/decisions/060)
ROWS = Shape(STATE, 4, 1)
LINE_WARPS = {CHUNK: 8, SMALL: 4}
TILE_WARPS = {CHUNK: 8, SMALL: 4}
TOGETHER = 8  # heads of a program of scan_tiles, at most
ONE_TILE = {CHUNK: Shape(STATE, 4, 1), SMALL: Shape(STATE, 4, 1)}  # a sequence
MANY_TILES = Shape(STATE, 4, 3)


def check(layer: Scan) -> None:
    """Raises RuntimeError for a layer that the kernels do not compute."""
    if (layer.head_dim, layer.state_dim, layer.heads % 2) != (DIM, STATE, 0):
        sizes = f"{layer.heads} heads of {layer.head_dim} by {layer.state_dim}"
        raise RuntimeError(f"a scan of {sizes}, kernels support even numbers of {DIM} by {STATE}")
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
    assert states.matrices.dtype == MATRICES
    lines = convolved(x, layer.convolution, states.inputs, few)
    launch(
        _rows(x.dtype),
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
    assert states.matrices.dtype == MATRICES
    heads, groups, count, size = layer.heads, layer.groups, len(tiles.tiles), tiles.rows
    xs = x.new_empty((count, heads, size, DIM))
    bs, cs = (x.new_empty((count, groups, size, STATE)) for _ in range(2))
    ps = x.new_empty((count, heads, size, size))
    ds, gs = (x.new_empty((count, heads, size), dtype=torch.float32) for _ in range(2))
    weight, bias = layer.convolution.weight, layer.convolution.bias
    # Without a bias the kernels read none; any pointer will do.
    filters = weight, weight if bias is None else bias
    launch(
        _lines(x.dtype, weight.dtype, bias is not None, states.inputs.dtype, size),
        count * (heads * DIM // STATE + 2 * groups),
        *(x, x.stride(0), dt, dt.stride(0), *filters, layer.decay.a_log, layer.decay.dt_bias),
        *(states.inputs, tiles.tiles, tiles.tile_sources),
        *(xs, bs, cs, ds, gs, heads, groups),
    )
    each = math.gcd(heads // groups, TOGETHER)
    sizes = (heads, groups, each)
    launch(_tiles(x.dtype, size), count * (heads // each), bs, cs, ds, gs, ps, *sizes)
    shape = MANY_TILES if tiles.most > 1 else ONE_TILE[size]
    launch(
        _pass(x.dtype, states.inputs.dtype, size, shape),
        len(tiles.sources) * heads,
        *(x, x.stride(0), xs, bs, cs, ps, ds, gs, layer.skip, states.inputs, states.matrices),
        *(out, out.stride(0), tiles.chains, tiles.sources, tiles.stops, tiles.slots),
        *(heads, groups),
    )


def variants(dtype: torch.dtype) -> Iterator[Variant]:
    """All variants that are launched here."""
    weights = list(itertools.product((dtype, torch.float32), (False, True)))
    yield _rows(dtype)
    for (weight, biased), size in itertools.product(weights, (CHUNK, SMALL)):
        yield _lines(dtype, weight, biased, dtype, size)
    for size in (CHUNK, SMALL):
        yield _tiles(dtype, size)
    for size, shape in ((CHUNK, MANY_TILES), *ONE_TILE.items()):
        yield _pass(dtype, dtype, size, shape)


def _rows(dtype: torch.dtype) -> Variant:
    x, state = pointers(dtype, MATRICES)
    arguments = ("*fp32", x, "i32", "*fp32", "*fp32", "*fp32", state, x, "i32")
    plan = ("*i32", "*i64", "*i64", "i32", "i32")
    constants = (("DIM", DIM), ("STATE", STATE))
    return Variant("scan_rows", (*arguments, *plan), (0, 6, 7, 8), constants, ROWS.warps, 1)


def _lines(
    dtype: torch.dtype, weight: torch.dtype, biased: bool, inputs: torch.dtype, size: int
) -> Variant:
    x, filters, old = pointers(dtype, weight, inputs)
    arguments = (x, "i32", x, "i32", filters, filters, "*fp32", "*fp32", old, "*i32", "*i64")
    made = (x, x, x, "*fp32", "*fp32", "i32", "i32")
    constants = {"DIM": DIM, "STATE": STATE, "ROWS": size, "WIDTH": WIDTH, "BIASED": int(biased)}
    aligned, given = (0, 1, 4, 5, 8, 11, 12, 13, 14, 15), tuple(constants.items())
    return Variant("scan_lines", (*arguments, *made), aligned, given, LINE_WARPS[size], 1)


def _tiles(dtype: torch.dtype, size: int) -> Variant:
    (x,) = pointers(dtype)
    arguments = (x, x, "*fp32", "*fp32", x, "i32", "i32", "i32")
    constants = (("STATE", STATE), ("ROWS", size))
    return Variant("scan_tiles", arguments, (0, 1, 2, 3, 4), constants, TILE_WARPS[size], 1)


def _pass(dtype: torch.dtype, inputs: torch.dtype, size: int, shape: Shape) -> Variant:
    x, old, state = pointers(dtype, inputs, MATRICES)
    arguments = (x, "i32", x, x, x, x, "*fp32", "*fp32", "*fp32", old, state, x, "i32")
    plan = ("*i32", "*i64", "*i32", "*i64", "i32", "i32")
    constants = {"DIM": DIM, "STATE": STATE, "ROWS": size, "WIDTH": WIDTH}
    constants["STAGES"] = shape.stages
    aligned = (0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12)
    given = tuple(constants.items())
    return Variant("scan_pass", (*arguments, *plan), aligned, given, shape.warps, shape.stages)
