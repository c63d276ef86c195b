"""The tensors of towers, as their blocks declare them: whole on each rank, and in the dtype of the
model, as which a weight in fp8 is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from kvline_server.kernels.encoder import Norm
from kvline_server.model.linear import Filters, Rows, Tensors
from kvline_server.model.vision.config import CHANNELS, VisionConfig


@dataclass(frozen=True, slots=True)
class Linear:
    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None  # [out]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in] -> [rows, out]. By torch: on a CPU the kernels of a step's GEMMs keep code of
        every row count, and images have thousands of these."""
        return functional.linear(x, self.weight, self.bias)

    def into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """The same, into [rows, out]."""
        if self.bias is None:
            torch.mm(x, self.weight.t(), out=out)
        else:
            torch.addmm(self.bias, x, self.weight.t(), out=out)


def found(tensors: Tensors, config: VisionConfig) -> str:
    """What the names of the tower's tensors begin with in these files."""
    there = (at for at in config.prefixes if tensors.source.count(at))
    return next(there, config.prefixes[0])


def linear(
    tensors: Tensors, names: Sequence[str], outputs: int, inputs: int, bias: bool = True
) -> Linear:
    """Of tensors with so many outputs each, fused. `names` are without .weight and .bias."""
    weights, biases = (
        [vector(f"{name}.{kind}", outputs) for name in names] for kind in ("weight", "bias")
    )
    return Linear(tensors.get(weights, inputs), tensors.get(biases) if bias else None)


def vector(name: str, of: int) -> Rows:
    """All of a tensor's rows."""
    return Rows(name, range(of), of)


def embedding(tensors: Tensors, name: str, c: VisionConfig, bias: bool = True) -> Linear:
    """Of patches, in the files a convolution that has no overlaps."""
    frames = (c.frames,) if c.frames > 1 else ()
    shape = (c.hidden, CHANNELS, *frames, c.patch, c.patch)
    weight = Rows(f"{name}.weight", range(c.hidden), c.hidden, Filters(shape))
    own = tensors.get([weight], c.inputs)
    return Linear(own, tensors.get([vector(f"{name}.bias", c.hidden)]) if bias else None)


def layer_norm(tensors: Tensors, name: str, width: int, eps: float) -> Norm:
    weight, bias = (tensors.get([vector(f"{name}.{kind}", width)]) for kind in ("weight", "bias"))
    return Norm(weight, bias, eps)


def rms_norm(tensors: Tensors, name: str, width: int, eps: float, offset: float = 0.0) -> Norm:
    """`offset` is added to the weights."""
    return Norm(tensors.get([vector(f"{name}.weight", width)], offset=offset), None, eps)
