"""A mixture of experts in the place of an MLP: a router chooses some of many small MLPs a token.

With several ranks each has some columns of every expert, as of an MLP, so ranks have equal work
whatever the router chooses; the router is on each of them.
"""

from __future__ import annotations

import torch

from kvline_server.kernels.experts import Given, Layer, Routing
from kvline_server.kernels.interface import Kernels
from kvline_server.kernels.projection import Join, Norm, Operand, Projection
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
        own, columns = at + many.at, tensors.shard.of(c.intermediate)
        gate, up, down = many.names
        self.before = layer_norm(tensors, c, at, c.norms.before_mlp)
        self.after = layer_norm(tensors, c, at, c.norms.after_mlp)
        every = range(many.count)
        self.router = projection(tensors, [Rows(own + "gate", every, many.count)], c.hidden)
        inputs = [
            Rows(f"{own}experts.{expert}.{name}.weight", columns, c.intermediate)
            for expert in every
            for name in (gate, up)
        ]
        outputs = [
            Rows(f"{own}experts.{expert}.{down}.weight", range(c.hidden), c.hidden)
            for expert in every
        ]
        before = tensors.elements
        self.gate_up = tensors.get(inputs, c.hidden)  # [experts * 2 * width, hidden]
        self.down = tensors.get(outputs, c.intermediate, columns)  # [experts * hidden, width]
        self.elements = tensors.elements - before

    @property
    def layer(self) -> Layer:
        return Layer(self.gate_up, self.down)

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
        return kernels.gemms.join(made, Join(residual, self.after, norm))
