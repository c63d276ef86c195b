"""The order of a model's blocks. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    ATTENTION = "attention"
    RECURRENT = "recurrent"
    MLP = "mlp"
    EXPERTS = "experts"

    @property
    def mixes(self) -> bool:
        """Whether a row's results depend on the rows before it."""
        return self in (Kind.ATTENTION, Kind.RECURRENT)


@dataclass(frozen=True, slots=True)
class Block:
    kind: Kind
    layer: int  # in the names of its tensors
