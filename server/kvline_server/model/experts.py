"""A mixture of experts in the place of an MLP: a router chooses some of many small MLPs a token.

With several ranks each has some columns of every expert, as of an MLP, so ranks have equal work
whatever the router chooses; the router is on each of them.
"""

from __future__ import annotations

import torch

from kvline_server.kernels.experts import Given, Routing
from kvline_server.kernels.interface import Kernels
from kvline_server.kernels.projection import Join, Norm, Operand, Projection
from kvline_server.model import expert_weights
from kvline_server.model.blocks import layer_norm
from kvline_server.model.config import ModelConfig
from kvline_server.model.linear import Rows, Tensors, projection


class Experts:
    """With the router's logits in the dtype of the model and their softmax in float32, as the
    models' own code has them."""

    def __init__(self, tensors: Tensors, config: ModelConfig, at: str) -> None:
        """`at` is the prefix of the layer's tensors."""
        c, many = config, config.experts
        assert many is not None
        self.routing = Routing(many.chosen, many.renormalise, c.activation)
        own, every = at + many.at, range(many.count)
        self.before = layer_norm(tensors, c, at, c.norms.before_mlp)
        self.after = layer_norm(tensors, c, at, c.norms.after_mlp)
        self.scale = c.residual_scale
        router = [Rows(own + many.router, every, many.count)]
        self.router = projection(tensors, router, c.hidden, many.stacked)
        before = tensors.counts.copy()
        self.layer = expert_weights.read(tensors, c, many, own)
        self.counts = tensors.counts - before  # elements by dtype, as the files have them

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Those that are GEMMs of all rows."""
        return (self.router,)

    def __call__(
        self, kernels: Kernels, x: Operand, residual: torch.Tensor, norm: Norm | None, given: Given
    ) -> Operand:
        """As MLP. Rows that are not `given` are padding, and are routed nowhere."""
        settled = kernels.gemms.settle(x)
        logits = kernels.gemms.project(Operand(settled), self.router).rows
        made = kernels.experts.run(settled, logits, self.layer, self.routing, given)
        return kernels.gemms.join(made, Join(residual, self.after, norm, self.scale))
