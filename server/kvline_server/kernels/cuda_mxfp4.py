"""Experts in MXFP4 on a GPU: our Triton kernel (triton_mxfp4.py), which reads the weights packed.

Packing changes no number: it puts those of a unit, 128 of a row, where the kernel's shifts find
them, and what 32 rows have of a unit one after the other, so that a program reads whole lines.
For prompts it makes no weights in bfloat16 either (docs/decisions/059).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch.nn.functional import pad

from kvline_server.kernels.cubins import TRITON_TYPES, Variant, launch
from kvline_server.kernels.cuda_experts import ExpertGemms, Pairs, Tile
from kvline_server.kernels.experts import Layer
from kvline_server.kernels.mxfp4 import BIAS, BLOCK, Mxfp4Weight, PackedMxfp4

UNIT = 4 * BLOCK  # numbers of a row
GROUP = 32  # rows
ACTIVATION = "swiglu_oai"  # the kernel's
PTX = 1  # tests in Triton's interpreter set 0
PACKED_ROWS = 1 << 12  # at a time, as words of 32 bits
# bfloat16's exponents: a number of 4 bits begins at 2^-126, which its scale makes up for.
SHIFT = 126
LARGEST = 2 * BIAS - SHIFT  # of a scale, as published: 2^1


TILES = (  # rows are the most pairs of a program; with fewer its GEMM is as narrow as they need
    Tile(8, 32, UNIT, 4, 6),
    Tile(8, 64, UNIT, 4, 4),
    Tile(16, 64, UNIT, 4, 4),
    Tile(32, 64, UNIT, 4, 3),
    Tile(64, 64, UNIT, 4, 3),
    Tile(64, 128, UNIT, 8, 3),
    Tile(128, 128, UNIT, 8, 3),
)


def packed(weight: Mxfp4Weight) -> PackedMxfp4:
    """A whole weight, as tests and benchmarks have one. Of scales of up to LARGEST."""
    rows, inputs = weight.shape
    made = packing(rows, inputs, weight.values.device)
    pack(made, weight, 0)
    return made


def packing(rows: int, inputs: int, device: torch.device) -> PackedMxfp4:
    """Room for a weight [rows, inputs], which `pack` fills."""
    shape = rows // GROUP, -(-inputs // UNIT), GROUP
    values = torch.empty((*shape, BLOCK), dtype=torch.int16, device=device)
    scales = torch.empty(shape, dtype=torch.int32, device=device)
    return PackedMxfp4(values, scales, torch.Size((rows, inputs)))


def pack(into: PackedMxfp4, some: Mxfp4Weight, at: int) -> None:
    """As Packing.put. Scales are up to LARGEST."""
    for start in range(0, len(some), PACKED_ROWS):
        values, scales = _packed(some[start : start + PACKED_ROWS])
        first = (at + start) // GROUP
        own = slice(first, first + len(values))
        into.values[own], into.scales[own] = values, scales


def _packed(weight: Mxfp4Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """Views, to be copied."""
    rows, inputs = weight.shape
    units = -(-inputs // UNIT)
    nibbles = torch.stack((weight.values & 15, weight.values >> 4), dim=-1).view(rows, inputs)
    parts = pad(nibbles, (0, units * UNIT - inputs)).view(rows, units, 4, BLOCK)
    n0, n1, n2, n3 = (parts[:, :, part].to(torch.int32) for part in range(4))
    words = (n0 & 8) << 12 | (n0 & 7) << 6 | (n1 & 8) << 9 | (n1 & 7) << 3 | (n2 & 8) << 6 | n2 & 7
    words |= (n3 & 8) << 11 | (n3 & 6) << 9 | (n3 & 1) << 13
    exponents = pad(weight.scales + SHIFT, (0, 4 * units - inputs // BLOCK))
    scales = exponents.contiguous().view(torch.int32).view(rows // GROUP, GROUP, units)
    tiled = words.to(torch.int16).view(rows // GROUP, GROUP, units, BLOCK).transpose(1, 2)
    return tiled, scales.transpose(1, 2)


def check(mxfp4: bool, biased: bool, hidden: int, width: int) -> None:
    """Raises RuntimeError for experts that the kernels do not compute."""
    if biased and not mxfp4:
        raise RuntimeError("experts with biases in bfloat16, kernels support them in MXFP4")
    if mxfp4 and (hidden % GROUP or width % GROUP):
        sizes = f"experts of {width} columns and hidden size {hidden}"
        raise RuntimeError(f"{sizes} in MXFP4, kernels support multiples of {GROUP}")


class Mxfp4Gemms(ExpertGemms):
    tiles = TILES
    first = 0

    def both(
        self, x: torch.Tensor, layer: Layer, pairs: Pairs, activation: str, choice: int
    ) -> torch.Tensor:
        assert activation == ACTIVATION
        tile, bound = TILES[choice], pairs.tiles.shape[1]
        hidden, width = x.shape[1], layer.down.shape[1]
        gated, made = x.new_empty((len(pairs), width)), x.new_empty((len(pairs), hidden))
        for source, weight, bias, out in (
            (x, layer.gate_up, layer.gate_up_bias, gated),
            (gated, layer.down, layer.down_bias, made),
        ):
            assert isinstance(weight, PackedMxfp4)
            (outputs, inputs), units = (out.shape[1], source.shape[1]), weight.values.shape[1]
            variant = _variant(x.dtype, tile, out is gated, bias is not None)
            # Without a bias the kernel reads none; any pointer will do.
            parts = (weight.values, weight.scales, x if bias is None else bias)
            sizes = (pairs.tiles, bound, out, outputs, inputs, units)
            programs = bound * -(-outputs // (tile.outputs * (1 if out is gated else 2)))
            launch(variant, programs, source, pairs.order, *parts, *sizes)
        return made


def variants(dtype: torch.dtype) -> Iterator[Variant]:
    """All variants that are launched here."""
    for tile, (gated, biased) in itertools.product(
        TILES, ((True, True), (False, True), (False, False))
    ):
        yield _variant(dtype, tile, gated, biased)


def _variant(dtype: torch.dtype, tile: Tile, gated: bool, biased: bool) -> Variant:
    kind = f"*{TRITON_TYPES[dtype]}"
    arguments = (kind, "*i32", "*i16", "*i32", kind, "*i32", "i32", kind, "i32", "i32", "i32")
    sizes = {"ROWS": tile.rows, "OUTPUTS": tile.outputs, "PTX": PTX}
    constants = {"GATED": int(gated), "BIASED": int(biased)} | sizes
    aligned, given = (0, 2, 3, 7, 8, 9), tuple(constants.items())
    return Variant("grouped_mxfp4", arguments, aligned, given, warps=tile.warps, stages=tile.stages)
