"""What recurrent layers keep of each sequence, beside the KV cache of the others."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class StateShape:
    """A recurrent layer's state of one sequence."""

    inputs: tuple[int, int]  # [width - 1, channels], of the dtype of hidden states
    matrices: tuple[int, int, int]  # of the state dtype

    def nbytes(self, inputs: torch.dtype, matrices: torch.dtype) -> int:
        """With its inputs and its matrices in these."""
        kept = math.prod(self.inputs) * inputs.itemsize
        return kept + math.prod(self.matrices) * matrices.itemsize
