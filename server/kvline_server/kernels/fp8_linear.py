"""Linears with fp8 weights on a GPU: torch's scaled GEMM or our kernel, chosen by trial a shape.

Inputs are quantised by a kernel of their own. One row's weights are read as they are, with the norm
before them or the sum after them, as in cuda_linear.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import ScalingType, pad

from kvline_server.kernels import fp8
from kvline_server.kernels.cubins import TRITON_TYPES, Variant, launch
from kvline_server.kernels.fp8 import BLOCK, FP8, Fp8Weight
from kvline_server.kernels.linears import Linears
from kvline_server.kernels.projection import Operand
from kvline_server.kernels.tuning import Choices

SCALED = -3  # torch's; the numbers of our tiles are TILED and below
TILED = -16
FOURS = 4  # in which cuBLASLt has rows with scales of blocks, and such scales along inputs
OUTPUTS, INPUTS, WARPS = 8, 1024, 8  # of one_row_fp8
PART = 1024  # columns of a program that quantises blocks
WIDTHS = tuple(fp8.WIDEST >> n for n in reversed(range(7)))  # of one that quantises a row
ADDED = 1024  # elements of a program of add_parts
CHECKED, OFF = 256, 2e-2  # rows and outputs whose distance from the reference is at most OFF


@dataclass(frozen=True, slots=True)
class Tile:
    """Of a program of `scaled`."""

    rows: int
    outputs: int  # a divisor of BLOCK: they share their scales
    splits: int  # of the inputs
    warps: int
    stages: int


SPLIT_ROWS = 256  # with more, the sums of the parts would take GiB, and no processor is idle
TILES = (
    Tile(16, 32, 1, 4, 6),
    Tile(16, 64, 1, 4, 6),
    Tile(16, 64, 4, 4, 5),
    Tile(32, 64, 1, 4, 5),
    Tile(32, 64, 4, 4, 5),
    Tile(64, 64, 1, 4, 5),
    Tile(64, 64, 4, 4, 5),
    Tile(64, 128, 1, 4, 4),
    Tile(128, 64, 1, 4, 4),
    Tile(128, 128, 1, 8, 4),
)


def pack(weight: Fp8Weight) -> Fp8Weight:
    """With scales of blocks as cuBLASLt has them: padded along the inputs."""
    if not weight.blocks:
        return weight
    more = -weight.scales.shape[1] % FOURS
    return replace(weight, scales=pad(weight.scales, (0, more)))


class Fp8Linears(Linears[Fp8Weight]):
    """`choices` are those of all GEMMs; the tuned row count that is next to others is theirs."""

    gates = True

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self._nearest: Choices = {}

    def pack(self, weight: Fp8Weight) -> Fp8Weight:
        return pack(weight)

    def takes_row(self, x: torch.Tensor, weight: Fp8Weight) -> bool:
        return len(x) == 1

    def row(
        self,
        x: Operand,
        weight: Fp8Weight,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        gated: bool = False,
        added: bool = False,
    ) -> torch.Tensor:
        return one_row(x, weight, bias, out, gated, added)

    def rows(
        self,
        x: Operand,
        weight: Fp8Weight,
        bias: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        made = x.rows.new_empty((len(x), len(weight))) if out is None else out
        run(x.rows, weight, made, self.choice(len(x), weight), x.gated)
        return made if bias is None else made.add_(bias)

    def candidates(self, x: torch.Tensor, weight: Fp8Weight, out: torch.Tensor) -> list[int]:
        return candidates(len(x), weight)

    def right(
        self, x: torch.Tensor, weight: Fp8Weight, out: torch.Tensor, choices: list[int]
    ) -> list[int]:
        return right(x, weight, out, choices)

    def run(self, x: torch.Tensor, weight: Fp8Weight, out: torch.Tensor, choice: int) -> None:
        run(x, weight, out, choice)

    def tuned(self) -> None:
        self._nearest.clear()

    def choice(self, rows: int, weight: Fp8Weight) -> int:
        """The one for these rows, else for the next more that were tuned, else for the most."""
        key = (rows, *weight.shape)
        if (found := self._nearest.get(key)) is None:
            known = {
                count: choice
                for (count, *shape), choice in self.choices.items()
                if shape == list(weight.shape) and choice in candidates(count, weight)
            }
            more = [count for count in known if count >= rows]
            at = min(more) if more else max(known, default=None)
            found = TILED - _tiles(rows)[-1] if at is None else known[at]
            self._nearest[key] = found
        return found


def candidates(rows: int, weight: Fp8Weight) -> list[int]:
    """torch's first, where it has one."""
    whole = not weight.blocks or not any(n % BLOCK for n in weight.shape)
    return [SCALED] * whole + [TILED - index for index in _tiles(rows)]


def _tiles(rows: int) -> list[int]:
    """Indices of those that waste little of so many rows."""
    wanted = min(TILES[-1].rows, max(TILES[0].rows, 1 << (rows - 1).bit_length()))
    return [
        at
        for at, tile in enumerate(TILES)
        if wanted // 2 <= tile.rows <= wanted and (tile.splits == 1 or rows <= SPLIT_ROWS)
    ]


def right(x: torch.Tensor, weight: Fp8Weight, out: torch.Tensor, choices: list[int]) -> list[int]:
    """Those that run, and give what the reference does for the last rows and outputs, where a wrong
    stride shows. Raises torch.OutOfMemoryError, and RuntimeError where none is left."""
    last = weight.last(CHECKED)
    want = fp8.linear(x[-CHECKED:], last)
    found = []
    for choice in choices:
        try:
            run(x, weight, out.fill_(float("nan")), choice)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError):  # cuBLASLt has no algorithm for it, or torch refuses it
            continue
        made = out[-CHECKED:, -len(last) :].float()
        if (made - want).norm() <= OFF * want.norm():
            found.append(choice)
    if not found:
        raise RuntimeError(f"no kernel for fp8 weights {list(weight.shape)} gives what it should")
    return found


def run(
    x: torch.Tensor, weight: Fp8Weight, out: torch.Tensor, choice: int, gated: bool = False
) -> None:
    """x [rows, in], or where it is gated first [rows, 2 * in] -> out [rows, out]"""
    if not len(x):
        return
    values, scales = quantised(x, weight.blocks, gated)
    if choice != SCALED:
        _tiled(values, scales, weight, out, TILES[TILED - choice])
    elif weight.blocks:
        _by_blocks(values, scales, weight, out)
    else:
        by_row = weight.scales.t()
        torch._scaled_mm(values, weight.values.t(), scales, by_row, out_dtype=out.dtype, out=out)


def _by_blocks(
    values: torch.Tensor, scales: torch.Tensor, weight: Fp8Weight, out: torch.Tensor
) -> None:
    """torch's function of Python that calls this has no `out`."""
    padded = len(values) > len(out)
    made = out.new_empty((len(values), len(weight))) if padded else out
    torch._scaled_mm_v2(
        values,
        weight.values.t(),
        [scales.t()],
        [ScalingType.BlockWise1x128.value],
        [],
        [weight.scales.t()],
        [ScalingType.BlockWise128x128.value],
        [],
        None,
        out.dtype,
        out=made,
    )
    if padded:
        out.copy_(made[: len(out)])


def quantised(
    x: torch.Tensor, blocks: bool, gated: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, in], or where it is gated first [rows, 2 * in] -> float8_e4m3fn [rows, in], and
    float32 [rows, 1]; of blocks with rows of padding, which mean nothing, and float32
    [ceil(in / 128), rows]"""
    rows, inputs = len(x), x.shape[1] // (1 + gated)
    padded = rows + -rows % FOURS if blocks else rows
    shape, parts = ((-(-inputs // BLOCK), padded), -(-inputs // PART)) if blocks else ((rows, 1), 1)
    values = torch.empty((padded, inputs), dtype=FP8, device=x.device)
    scales = torch.empty(shape, dtype=torch.float32, device=x.device)
    width = PART if blocks else next(width for width in WIDTHS if width >= inputs)
    variant = _quantise_variant(x.dtype, blocks, gated, width)
    sizes = (inputs, scales.shape[1], parts)
    launch(variant, rows * parts, x.contiguous(), values, scales, *sizes)
    return values, scales


def _tiled(
    values: torch.Tensor, scales: torch.Tensor, weight: Fp8Weight, out: torch.Tensor, tile: Tile
) -> None:
    rows, outputs = out.shape
    programs = -(-rows // tile.rows) * -(-outputs // tile.outputs) * tile.splits
    made: Any = out
    if tile.splits > 1:
        made = torch.empty((tile.splits, rows, outputs), dtype=torch.float32, device=out.device)
    own = weight.scales
    inputs = (values, scales, scales.shape[1], weight.values, own, own.shape[1])
    variant = _scaled_variant(out.dtype, weight.blocks, tile)
    launch(variant, programs, *inputs, made, rows, outputs, values.shape[1])
    if tile.splits > 1:
        variant = _add_variant(out.dtype, tile.splits)
        launch(variant, -(-out.numel() // ADDED), made, out, out.numel())


def one_row(
    x: Operand,
    weight: Fp8Weight,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    gated: bool = False,
    added: bool = False,
) -> torch.Tensor:
    """Linears.row."""
    hidden, norm = x.rows, x.norm
    made = hidden.new_empty((1, len(weight) // (1 + gated))) if out is None else out
    variant = _row_variant(
        hidden.dtype, weight.blocks, norm is not None, gated, bias is not None, added
    )
    outputs = made.shape[1]
    scale, eps = (hidden, 0.0) if norm is None else (norm.weight, norm.eps)
    own = weight.values, weight.scales, weight.scales.shape[1]
    shift = hidden if bias is None else bias
    programs = -(-outputs // OUTPUTS)
    launch(variant, programs, hidden, scale, eps, *own, shift, made, outputs, weight.shape[1])
    return made


def variants(dtype: torch.dtype) -> Iterator[Variant]:
    """All variants that are launched here."""
    for gated in (False, True):
        yield _quantise_variant(dtype, True, gated, PART)
        for width in WIDTHS:
            yield _quantise_variant(dtype, False, gated, width)
    for splits in sorted({tile.splits for tile in TILES} - {1}):
        yield _add_variant(dtype, splits)
    for blocks in (False, True):
        for tile in TILES:
            yield _scaled_variant(dtype, blocks, tile)
        yield _row_variant(dtype, blocks, True, True, False, False)
        for bias in (False, True):
            yield _row_variant(dtype, blocks, True, False, bias, False)
            yield _row_variant(dtype, blocks, False, False, bias, True)
            yield _row_variant(dtype, blocks, False, False, bias, False)


def _quantise_variant(dtype: torch.dtype, blocks: bool, gated: bool, width: int) -> Variant:
    pointers = (f"*{TRITON_TYPES[dtype]}", f"*{TRITON_TYPES[FP8]}", "*fp32")
    constants = (("BLOCKS", int(blocks)), ("GATED", int(gated)), ("WIDTH", width))
    arguments = (*pointers, "i32", "i32", "i32")
    warps = min(32, max(4, width // 1024))
    return Variant("quantise", arguments, (0, 1, 3), constants, warps=warps)


def _scaled_variant(dtype: torch.dtype, blocks: bool, tile: Tile) -> Variant:
    kind, out = f"*{TRITON_TYPES[FP8]}", "*fp32" if tile.splits > 1 else f"*{TRITON_TYPES[dtype]}"
    factors = (kind, "*fp32", "i32") * 2
    arguments = (*factors, out, "i32", "i32", "i32")
    constants = {"BLOCKS": int(blocks), "ROWS": tile.rows, "OUTPUTS": tile.outputs}
    constants["SPLITS"] = tile.splits
    aligned, given = (0, 3, 6, 8, 9), tuple(constants.items())
    return Variant("scaled", arguments, aligned, given, warps=tile.warps, stages=tile.stages)


def _add_variant(dtype: torch.dtype, splits: int) -> Variant:
    arguments = ("*fp32", f"*{TRITON_TYPES[dtype]}", "i32")
    constants = (("SPLITS", splits), ("BLOCK", ADDED))
    return Variant("add_parts", arguments, (0, 1, 2), constants)


def _row_variant(
    dtype: torch.dtype, blocks: bool, norm: bool, gated: bool, bias: bool, added: bool
) -> Variant:
    kind = f"*{TRITON_TYPES[dtype]}"
    weight = (f"*{TRITON_TYPES[FP8]}", "*fp32", "i32")
    arguments = (kind, kind, "fp32", *weight, kind, kind, "i32", "i32")
    constants = {"OUTPUTS": OUTPUTS, "INPUTS": INPUTS, "BLOCKS": int(blocks), "NORM": int(norm)}
    constants |= {"GATED": int(gated), "BIAS": int(bias), "ADD": int(added)}
    aligned, given = (0, 1, 3, 6, 7, 9), tuple(constants.items())
    return Variant("one_row_fp8", arguments, aligned, given, warps=WARPS)
