"""The tensors of a model, as its blocks declare them: linears here, norms in blocks.py.

A block names its tensors once, in its constructor, and gets its rank's part of them from a
`Tensors`. This one counts the part's elements and checks names and shapes; `Loading` (loader.py)
loads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from kvline_server.kernels.interface import Kernels, Normed
from kvline_server.model.shard import WHOLE, Shard


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a named tensor."""

    name: str
    rows: range
    of: int  # rows of the tensor


@dataclass(frozen=True, slots=True)
class Output:
    """One of the outputs of a Linear: a rank's rows, in the order of the output's elements."""

    ranges: Sequence[range]
    of: int  # rows on all ranks


class TensorSource(Protocol):
    """Tensors by name. `check` is called for all of them before the first `copy`, which copies
    a slice of the shape of `into` that begins at `row` and `column`."""

    def check(self, name: str, shape: tuple[int, ...]) -> None: ...

    def copy(self, name: str, into: torch.Tensor, row: int = 0, column: int = 0) -> None: ...


class Tensors:
    """Counts elements of a rank, and checks each tensor against the source."""

    def __init__(self, source: TensorSource, shard: Shard = WHOLE) -> None:
        self.source = source
        self.shard = shard
        self.elements = 0

    def get(
        self,
        parts: Sequence[Rows],
        columns: int | None = None,
        own: range | None = None,
        offset: float = 0.0,
    ) -> torch.Tensor:
        """The parts' rows in their order, of which the rank takes the `own` of all columns if
        given; `offset` added to each element; empty here. -> [rows], or [rows, columns]"""
        width = () if columns is None else (columns,)
        for name, rows in {part.name: part.of for part in parts}.items():
            self.source.check(name, (rows, *width))
        taken = (columns or 1) if own is None else len(own)
        self.elements += sum(len(part.rows) for part in parts) * taken
        return torch.empty(0)

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """A GEMM's weight, in the layout that is fastest for its kernel."""
        return weight


class Linear:
    """y = x W^T + b, with W and b of one or several named tensors: GEMMs that share an input are
    fused along the output axis, and the parts' order is the order of the output's elements.

    With several ranks it is column-parallel (a rank has its rows of each part) or, with `own`,
    row-parallel: a rank has those of the columns, and y is the sum of the ranks' outputs, to which
    rank 0 adds the bias (Kernels.linear_all_reduce)."""

    def __init__(
        self,
        tensors: Tensors,
        parts: Sequence[Rows],
        columns: int,
        bias: bool = False,
        own: range | None = None,
    ) -> None:
        """`parts` name tensors without the ending .weight or .bias."""
        weights, biases = (
            [replace(part, name=f"{part.name}.{kind}") for part in parts]
            for kind in ("weight", "bias")
        )
        self.weight = tensors.pack(tensors.get(weights, columns, own))
        self.bias = None
        if bias:
            elsewhere = own is not None and tensors.shard.rank > 0
            if elsewhere:  # checked all the same: all ranks end with the same error
                biases = [replace(part, rows=range(0)) for part in biases]
            loaded = tensors.get(biases)
            self.bias = None if elsewhere else loaded

    def __call__(
        self, kernels: Kernels, x: Normed, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [rows, columns] -> [rows, output], in `out` if given"""
        return kernels.linear(x, self.weight, self.bias, out)


def fused(at: str, names: Sequence[str], outputs: Sequence[Output]) -> list[Rows]:
    """Several outputs of one Linear: of a tensor each, or of the one tensor in which a checkpoint
    already has them one after the other."""
    parts: list[Rows] = []
    start, whole = 0, sum(output.of for output in outputs)
    for index, output in enumerate(outputs):
        name = at + names[index if len(names) > 1 else 0]
        of = whole if len(names) == 1 else output.of
        parts += [Rows(name, range(start + r.start, start + r.stop), of) for r in output.ranges]
        if len(names) == 1:
            start += output.of
    return parts
