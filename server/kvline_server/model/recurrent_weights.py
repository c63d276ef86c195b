"""Tensors that recurrent layers of all families have: a short convolution, and decays."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvline_server.kernels.recurrent import Convolution, Decay
from kvline_server.model.linear import Filters, Rows, Tensors


def convolution(
    tensors: Tensors, at: str, channels: Sequence[range], of: int, width: int, bias: bool = False
) -> Convolution:
    """A rank's `channels` of `of`, in the order of what it reads."""
    name = at + "conv1d."
    every = [Rows(name + "weight", some, of, Filters((of, 1, width))) for some in channels]
    biases = [Rows(name + "bias", some, of) for some in channels]
    return Convolution(tensors.get(every, width), tensors.get(biases) if bias else None)


def decay(tensors: Tensors, at: str, heads: range, of: int) -> Decay:
    """A rank's heads."""
    return Decay(
        in_float32(tensors, at + "A_log", heads, of), in_float32(tensors, at + "dt_bias", heads, of)
    )


def in_float32(tensors: Tensors, name: str, heads: range, of: int) -> torch.Tensor:
    """A number for each of a rank's heads."""
    return tensors.get([Rows(name, heads, of)], dtype=torch.float32)
