"""What a GPU has for the weights of one format: one row's kernels, and for more rows several, one
of which is chosen by trial for each shape (formats.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import torch

from kvline_server.kernels.projection import Operand

W = TypeVar("W")  # the format's weights


class Linears(ABC, Generic[W]):
    gates: bool  # `rows` takes an operand that is not gated yet, and gates it in passing

    def pack(self, weight: W) -> W:
        """In the layout of the kernels."""
        return weight

    @abstractmethod
    def takes_row(self, x: torch.Tensor, weight: W) -> bool:
        """Whether `row` is for x [rows, in]."""

    @abstractmethod
    def row(
        self,
        x: Operand,
        weight: W,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        gated: bool = False,
        added: bool = False,
    ) -> torch.Tensor:
        """Of one row, normed if that is left to it. -> [1, out], in `out` if given, to which it is
        `added` if asked; gated: silu of the first half, times the second -> [1, out / 2]"""

    @abstractmethod
    def rows(
        self, x: Operand, weight: W, bias: torch.Tensor | None, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Of any number of rows, by the chosen kernel; no norm is left to it.
        -> [rows, out], in `out` if given"""

    @abstractmethod
    def candidates(self, x: torch.Tensor, weight: W, out: torch.Tensor) -> list[int]:
        """The kernels to try for x [rows, in] -> out [rows, out], that of no trial first."""

    def right(self, x: torch.Tensor, weight: W, out: torch.Tensor, choices: list[int]) -> list[int]:
        """Those that give what they should. Raises RuntimeError where none is left."""
        return choices

    @abstractmethod
    def run(self, x: torch.Tensor, weight: W, out: torch.Tensor, choice: int) -> None:
        """By this kernel. x [rows, in] -> out [rows, out]"""

    def tuned(self) -> None:
        """To be called after a change of the choices."""
        return
