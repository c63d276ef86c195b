"""What a recurrent layer keeps of a sequence, whatever its length."""

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
        return (
            math.prod(self.inputs) * inputs.itemsize + math.prod(self.matrices) * matrices.itemsize
        )


@dataclass(frozen=True, slots=True)
class States:
    """A layer's pool of slots; updated in place."""

    inputs: torch.Tensor  # [slots, width - 1, channels], of the convolution, the newest last
    # Of a delta rule [slots, value heads, key dim, value dim], of a scan [slots, heads, head dim,
    # state dim]. Computed in float32; in bfloat16 it is rounded where it is stored, after a step
    # and on a CPU after each chunk.
    matrices: torch.Tensor
