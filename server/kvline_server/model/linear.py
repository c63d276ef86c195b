"""The tensors of a model, as its blocks declare them: linears here, norms in blocks.py.

A block names its tensors once, in its constructor, and gets them from a `Tensors`. This one counts
them and checks names and shapes; `Loading` (loader.py) loads them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kvline_server.kernels.interface import Kernels, Normed


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a named tensor."""

    name: str
    rows: range


class TensorSource(Protocol):
    """Tensors by name. `check` is called for all of them before the first `copy`, which copies
    len(into) rows from `row` on."""

    def check(self, name: str, shape: tuple[int, ...]) -> None: ...

    def copy(self, name: str, into: torch.Tensor, row: int = 0) -> None: ...


class Tensors:
    """Counts elements, and checks each tensor against the source."""

    def __init__(self, source: TensorSource) -> None:
        self.source = source
        self.elements = 0

    def get(
        self, parts: Sequence[Rows], columns: int | None = None, offset: float = 0.0
    ) -> torch.Tensor:
        """The parts' rows in their order, `offset` added to each element; empty here. The parts
        hold each row of a named tensor once. -> [rows], or [rows, columns]"""
        width = () if columns is None else (columns,)
        rows: Counter[str] = Counter()
        for part in parts:
            rows[part.name] += len(part.rows)
        for name, count in rows.items():
            self.source.check(name, (count, *width))
        self.elements += rows.total() * (columns or 1)
        return torch.empty(0)

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """A GEMM's weight, in the layout that is fastest for its kernel."""
        return weight


class Linear:
    """y = x W^T + b, with W and b of one or several named tensors: GEMMs that share an input are
    fused along the output axis, and the parts' order is the order of the output's elements.

    A shard rule for tensor parallelism has its place here, beside the parts: column-parallel (a
    rank loads its rows of each part) or row-parallel (its columns of all of them)."""

    def __init__(
        self, tensors: Tensors, parts: Sequence[Rows], columns: int, bias: bool = False
    ) -> None:
        """`parts` name tensors without the ending .weight or .bias."""
        weights, biases = (
            [Rows(f"{part.name}.{kind}", part.rows) for part in parts]
            for kind in ("weight", "bias")
        )
        self.weight = tensors.pack(tensors.get(weights, columns))
        self.bias = tensors.get(biases) if bias else None

    def __call__(
        self, kernels: Kernels, x: Normed, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [rows, columns] -> [rows, output], in `out` if given"""
        return kernels.linear(x, self.weight, self.bias, out)


def fused(at: str, names: Sequence[str], outputs: Sequence[Sequence[range]]) -> list[Rows]:
    """Several outputs of one Linear, each by its ranges of rows: of a tensor each, or of the one
    tensor in which a checkpoint already has them one after the other."""
    parts: list[Rows] = []
    start = 0
    for index, ranges in enumerate(outputs):
        name = at + names[index if len(names) > 1 else 0]
        parts += [Rows(name, range(start + r.start, start + r.stop)) for r in ranges]
        if len(names) == 1:
            start += sum(len(r) for r in ranges)
    return parts
