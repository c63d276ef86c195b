"""The MLP of a decoder, and the norms of all its blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvline_server.kernels.experts import Given
from kvline_server.kernels.interface import Kernels
from kvline_server.kernels.projection import Gate, Join, Norm, Operand, Projection
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


class MLP:
    def __init__(self, tensors: Tensors, config: ModelConfig, at: str) -> None:
        """`at` is the prefix of the layer's tensors."""
        c, own, columns = config, at + config.names.mlp, tensors.shard.of(config.intermediate)
        both = [Output([columns], c.intermediate)] * 2
        self.before = layer_norm(tensors, c, at, c.norms.before_mlp)
        self.after = layer_norm(tensors, c, at, c.norms.after_mlp)
        self.gate_up = projection(tensors, fused(own, c.gate_up, both), c.hidden, c.mlp_bias)
        down = [Rows(own + "down_proj", range(c.hidden), c.hidden)]
        self.down = projection(tensors, down, c.intermediate, c.mlp_bias, columns)
        self.activation, self.scale = c.activation, c.residual_scale

    @property
    def projections(self) -> tuple[Projection, ...]:
        return self.gate_up, self.down

    def __call__(
        self, kernels: Kernels, x: Operand, residual: torch.Tensor, norm: Norm | None, given: Given
    ) -> Operand:
        """Joins its output to the residual, with the norm of what follows; as Experts, for which
        the `given` rows alone count."""
        gated = kernels.gemms.project(x, self.gate_up, Gate(self.activation))
        return kernels.gemms.project(gated, self.down, Join(residual, self.after, norm, self.scale))
