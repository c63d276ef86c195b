"""The MLP of a decoder, and the norms of all its blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvline_server.kernels.experts import Given
from kvline_server.kernels.interface import Kernels
from kvline_server.kernels.projection import Epilogue, Gate, Join, Norm, Operand, Projection
from kvline_server.model.config import ModelConfig
from kvline_server.model.linear import Output, Rows, Tensors, fused, projection


def norm(
    tensors: Tensors, config: ModelConfig, name: str, width: int, own: Sequence[range] = ()
) -> Norm:
    """Of `width` elements, of which this rank has its `own` if given, in their order. An offset of
    the weights is added once, at load. In bfloat16 1 + weight is off by then, by at most one part
    in 256, where a model's own code adds in float32."""
    parts = [Rows(f"{name}.weight", some, width) for some in own or (range(width),)]
    return Norm(tensors.get(parts, offset=config.norms.offset), config.norm_eps)


def layer_norm(tensors: Tensors, config: ModelConfig, at: str, name: str | None) -> Norm | None:
    """One of a layer's norms over the hidden states; None where the model has none there."""
    return None if name is None else norm(tensors, config, at + name, config.hidden)


def norm_across(kernels: Kernels, vectors: Sequence[tuple[torch.Tensor, Norm]]) -> None:
    """In place: norms of vectors of which each rank has a part, all of one width; parts that
    several ranks have, all have as often. Each [rows, part]"""
    squares = torch.stack([x.float().square().mean(dim=-1) for x, _ in vectors], dim=1)
    means = kernels.group.all_reduce(squares).div_(kernels.group.ranks)
    for index, (x, own) in enumerate(vectors):
        scale = torch.rsqrt(means[:, index : index + 1] + own.eps)
        x.copy_(x.float().mul(scale).mul_(own.weight))


class Dense:
    """Two GEMMs with an activation between them."""

    def __init__(self, tensors: Tensors, config: ModelConfig, at: str, width: int) -> None:
        """`at` is the prefix of its tensors."""
        c, columns = config, tensors.shard.of(width)
        self.activation = c.activation
        inputs = [Output([columns], width)] * (1 if c.activation == "relu2" else 2)
        self.gate_up = projection(tensors, fused(at, c.gate_up, inputs), c.hidden, c.mlp_bias)
        down = [Rows(at + c.names.down, range(c.hidden), c.hidden)]
        self.down = projection(tensors, down, width, c.mlp_bias, columns)

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.gate_up, self.down

    def run(self, kernels: Kernels, x: Operand, then: Epilogue) -> Operand:
        gated = kernels.gemms.project(x, self.gate_up, Gate(self.activation))
        return kernels.gemms.project(gated, self.down, then)


class MLP(Dense):
    def __init__(self, tensors: Tensors, config: ModelConfig, at: str) -> None:
        """`at` is the prefix of the layer's tensors."""
        c = config
        self.before = layer_norm(tensors, c, at, c.norms.before_mlp)
        self.after = layer_norm(tensors, c, at, c.norms.after_mlp)
        super().__init__(tensors, c, at + c.names.mlp, c.intermediate)
        self.scale = c.residual_scale

    def __call__(
        self, kernels: Kernels, x: Operand, residual: torch.Tensor, norm: Norm | None, given: Given
    ) -> Operand:
        """Joins its output to the residual, with the norm of what follows; as Experts, for which
        the `given` rows alone count."""
        return self.run(kernels, x, Join(residual, self.after, norm, self.scale))
