"""The tensors of a model, as its blocks declare them: projections and norms.

A block names its tensors once, in its constructor, and gets its rank's part of them from a
`Tensors`. This one counts the part's elements and checks names and shapes; `Loading` (loader.py)
loads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from kvline_server.kernels import mxfp4
from kvline_server.kernels.fp8 import BLOCK, FP8, Fp8Weight, Weight, fits
from kvline_server.kernels.interface import Kernels
from kvline_server.kernels.mxfp4 import Mxfp4Weight, PackedMxfp4
from kvline_server.kernels.projection import Projection
from kvline_server.model.quantization import Quantization
from kvline_server.model.shard import WHOLE, Shard


@dataclass(frozen=True, slots=True)
class Stacked:
    """One of the matrices, or vectors, that a tensor has one after the other."""

    shape: tuple[int, ...]  # of the tensor; what follows a matrix's rows is its columns
    at: int  # which of them
    transposed: bool = False  # in the tensor

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """A view of it. -> [rows, columns], or [rows]"""
        own = whole[self.at]
        if own.dim() == 1:
            return own
        return own.t() if self.transposed else own.flatten(1)


@dataclass(frozen=True, slots=True)
class Filters(Stacked):
    """The weight of a convolution, whose filters are its rows: [filters, ...]."""

    at: int = 0

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.flatten(1)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a named tensor, or of one of those that are stacked in it."""

    name: str
    rows: range
    of: int  # rows of the tensor
    stacked: Stacked | None = None

    def shape(self, width: tuple[int, ...]) -> tuple[int, ...]:
        """The tensor's, with rows of `width`: of no columns, or of so many."""
        return (self.of, *width) if self.stacked is None else self.stacked.shape


@dataclass(frozen=True, slots=True)
class Output:
    """One of the outputs of a projection: a rank's rows, in the order of the output's elements."""

    ranges: Sequence[range]
    of: int  # rows on all ranks


class TensorSource(Protocol):
    """Tensors by name. `has` says which of several names is there. `check` is called for all of
    them before the first `copy`, which copies the part's rows, and of them as many columns as
    `into` has, from `column` on."""

    def has(self, name: str) -> bool: ...

    def count(self, prefix: str) -> int:
        """Tensors whose names begin so."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor that is there, else of none."""

    def check(self, name: str, shape: tuple[int, ...]) -> None: ...

    def copy(self, part: Rows, into: torch.Tensor, column: int = 0) -> None: ...

    def fp8(self, name: str) -> Quantization | None:
        """Of a tensor that can be copied as it is to one of fp8."""


class Tensors:
    """Counts elements of a rank, and checks each tensor against the source. Without kernels, of
    weights that are as any kernels take them."""

    device = torch.device("meta")

    def __init__(
        self, source: TensorSource, shard: Shard = WHOLE, kernels: Kernels | None = None
    ) -> None:
        self.source = source
        self.shard = shard
        self.keeps_fp8 = kernels is not None and kernels.gemms.keeps_fp8
        self._experts = None if kernels is None else kernels.experts
        self.counts: Counter[torch.dtype | None] = Counter()  # elements; None: of the model's dtype
        self.scales = 0  # elements of weights' scales
        self.padding = 0  # bytes that the kernels' layout of experts in MXFP4 adds

    @property
    def elements(self) -> int:
        """But for weights in fp8 and their scales."""
        return self.counts[None]

    def get(
        self,
        parts: Sequence[Rows],
        columns: int | None = None,
        own: range | None = None,
        offset: float = 0.0,
        dtype: torch.dtype | None = None,
        room: int = 0,
    ) -> torch.Tensor:
        """The parts' rows in their order, of which the rank takes the `own` of all columns if
        given; `offset` added to each element; behind them `room` rows of zeros, which are not
        counted; empty here. -> [rows], or [rows, columns]"""
        width = () if columns is None else (columns,)
        for name, shape in {part.name: part.shape(width) for part in parts}.items():
            self.source.check(name, shape)
        taken = (columns or 1) if own is None else len(own)
        self.counts[dtype] += sum(len(part.rows) for part in parts) * taken
        return torch.empty(0)

    def weight(self, parts: Sequence[Rows], columns: int, own: range | None = None) -> Weight:
        """A GEMM's, which stays in fp8 where the source has it so and the kernels take it, with its
        scales fused and cut alike."""
        kept = self._kept(parts, columns, own) if self.keeps_fp8 else None
        if kept is None:
            return self.pack(self.get(parts, columns, own))
        values = self.get(parts, columns, own, dtype=FP8)
        height, width = kept.block or (1, columns)
        scaled = [
            Rows(part.name + kept.suffix, _blocks(part.rows, height), -(-part.of // height))
            for part in parts
        ]
        across = None if own is None or kept.block is None else _blocks(own, width)
        before = self.counts[torch.float32]
        scales = self.get(scaled, -(-columns // width), across, dtype=torch.float32)
        self.scales += self.counts[torch.float32] - before
        return self.pack(Fp8Weight(values, scales, kept.block is not None))

    def _kept(self, parts: Sequence[Rows], columns: int, own: range | None) -> Quantization | None:
        """None where the weight cannot stay in fp8: a part is not, or begins or ends within a block
        of its tensor. The same on every rank."""
        taken = range(columns) if own is None else own
        first, *others = {self.source.fp8(part.name) for part in parts}
        if others or first is None or not fits(sum(len(p.rows) for p in parts), len(taken)):
            return None
        if first.block is None:
            return first
        cuts = [(part.rows, part.of, part is parts[-1]) for part in parts]
        whole = all(_at_blocks(*cut) for cut in (*cuts, (taken, columns, True)))
        return first if whole and first.block == (BLOCK, BLOCK) else None

    def pack(self, weight: Weight) -> Weight:
        """A GEMM's weight, in the layout that is fastest for its kernel."""
        return weight

    def experts(
        self, values: Sequence[Rows], scales: Sequence[Rows], inputs: int, own: range | None = None
    ) -> Mxfp4Weight | PackedMxfp4:
        """A weight of all experts of a layer in MXFP4, of parts that are all of as many rows, each
        with its scales; of the `own` of all inputs if given. In the layout of the kernels."""
        made, room = self._mxfp4(values, scales, inputs, own), self._packing(values, inputs, own)
        return made if room is None else room.made

    def _mxfp4(
        self, values: Sequence[Rows], scales: Sequence[Rows], inputs: int, own: range | None
    ) -> Mxfp4Weight:
        return Mxfp4Weight(
            self.get(values, inputs // 2, _cut(own, 2), dtype=torch.uint8),
            self.get(scales, inputs // mxfp4.BLOCK, _cut(own, mxfp4.BLOCK), dtype=torch.uint8),
        )

    def _packing(
        self, values: Sequence[Rows], inputs: int, own: range | None
    ) -> mxfp4.Packing | None:
        """Room for it where kernels have a layout of their own; counts what that adds."""
        rows, taken = sum(len(p.rows) for p in values), inputs if own is None else len(own)
        room = None if self._experts is None else self._experts.packing(rows, taken, self.device)
        if room is not None:
            self.padding += room.made.nbytes - rows * (taken // 2 + taken // mxfp4.BLOCK)
        return room


def _cut(own: range | None, size: int) -> range | None:
    """Columns of so many numbers each."""
    return None if own is None else range(own.start // size, own.stop // size)


def _at_blocks(taken: range, of: int, last: bool) -> bool:
    """Whether these of `of` rows or columns are whole blocks; the last block may be a short one."""
    return taken.start % BLOCK == len(taken) % BLOCK == 0 or (last and taken == range(of))


def _blocks(taken: range, size: int) -> range:
    """The blocks of rows or columns."""
    return range(taken.start // size, -(-taken.stop // size))


def projection(
    tensors: Tensors,
    parts: Sequence[Rows],
    columns: int,
    bias: bool = False,
    own: range | None = None,
) -> Projection:
    """Of one or several named tensors: GEMMs that share an input are fused along the output axis,
    and the parts' order is the order of the output's elements. `parts` name tensors without the
    ending .weight or .bias.

    With several ranks it is column-parallel (a rank has its rows of each part) or, with `own`,
    row-parallel: a rank has those of the columns."""
    weights, biases = (
        [replace(part, name=f"{part.name}.{kind}") for part in parts] for kind in ("weight", "bias")
    )
    weight = tensors.weight(weights, columns, own)
    if not bias:
        return Projection(weight)
    elsewhere = own is not None and tensors.shard.rank > 0
    if elsewhere:  # checked all the same: all ranks end with the same error
        biases = [replace(part, rows=range(0)) for part in biases]
    loaded = tensors.get(biases)
    return Projection(weight, None if elsewhere else loaded)


def fused(at: str, names: Sequence[str], outputs: Sequence[Output]) -> list[Rows]:
    """Several outputs of one projection: of a tensor each, or of the one tensor in which a
    checkpoint already has them one after the other."""
    parts: list[Rows] = []
    start, whole = 0, sum(output.of for output in outputs)
    for index, output in enumerate(outputs):
        name = at + names[index if len(names) > 1 else 0]
        of = whole if len(names) == 1 else output.of
        parts += [Rows(name, range(start + r.start, start + r.stop), of) for r in output.ranges]
        if len(names) == 1:
            start += output.of
    return parts
