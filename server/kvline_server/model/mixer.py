"""What mixes a sequence's rows: attention over its KV cache, or a recurrence over its state.

A mixer has two halves, and between them `run`, which alone depends on which sequence a row belongs
to. So a captured graph breaks there: `project` ends a segment, and `finish` begins the next one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvline_server.kernels.attention import SlotMapping
from kvline_server.kernels.interface import Kernels
from kvline_server.kernels.projection import Join, Norm, Operand, Projection
from kvline_server.memory.groups import Memory

Made = Sequence[torch.Tensor]  # of a mixer's first half, a tensor of each of its widths


@dataclass(frozen=True, slots=True)
class Projected:
    """Of one mixer, between its halves; views of what the first half makes."""

    inputs: tuple[torch.Tensor, ...]  # of `run`, [rows, ...] each
    gate: torch.Tensor | None = None  # of `finish`, [rows, ...]

    def picked(self, rows: torch.Tensor) -> Projected:
        """What `finish` reads of some rows."""
        return Projected((), None if self.gate is None else self.gate[rows])


@dataclass(frozen=True, slots=True)
class Place:
    """Where rows are in their sequences, for mixers that know positions."""

    mapping: SlotMapping
    rope: torch.Tensor | None  # Attention.rope_table; None: positions are not encoded


class Mixer(ABC):
    before: Norm | None
    after: Norm | None  # before it is added to the residual
    widths: tuple[int, ...]  # of rows that the first half makes
    width: int  # of rows that `run` makes

    @property
    @abstractmethod
    def projections(self) -> tuple[Projection, ...]:
        """Its GEMMs of all rows."""

    @abstractmethod
    def project(
        self, kernels: Kernels, x: Operand, memory: Memory, place: Place, into: Made | None = None
    ) -> Projected:
        """The first half. x [rows, hidden]; made in `into` if given, [rows, width] of each width"""

    @abstractmethod
    def split(self, made: Made) -> Projected:
        """What the first half left in these."""

    @abstractmethod
    def run(
        self,
        kernels: Kernels,
        inputs: tuple[torch.Tensor, ...],
        memory: Memory,
        plan: Any,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Over each row's sequence, whose memory a recurrence updates. `plan` is the step's, of
        this kind of memory. -> [rows, width], in `out` if given"""

    @abstractmethod
    def finish(
        self, kernels: Kernels, made: torch.Tensor, gate: torch.Tensor | None, then: Join
    ) -> Operand:
        """The second half: from what `run` made to the residual, normed for what follows."""
