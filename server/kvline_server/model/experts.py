"""A mixture of experts in the place of an MLP: a router chooses some of many small MLPs a token.

With several ranks each has some columns of every expert, as of an MLP, so ranks have equal work
whatever the router chooses; the router is on each of them.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from kvline_server.kernels.experts import Given, Routing
from kvline_server.kernels.interface import Kernels
from kvline_server.kernels.projection import STORE, Join, Norm, Operand, Projection
from kvline_server.model import expert_weights
from kvline_server.model.blocks import Dense, layer_norm
from kvline_server.model.config import ModelConfig
from kvline_server.model.linear import Rows, Tensors, projection


class Experts:
    """With the router's logits in the dtype of the model and their softmax in float32, as the
    models' own code has them."""

    def __init__(self, tensors: Tensors, config: ModelConfig, at: str) -> None:
        """`at` is the prefix of the layer's tensors."""
        c, many = config, config.experts
        assert many is not None
        self.routing = Routing(many.chosen, many.renormalise, c.activation, many.scores, many.scale)
        own, every = at + many.at, range(many.count)
        self.before = layer_norm(tensors, c, at, c.norms.before_mlp)
        self.after = layer_norm(tensors, c, at, c.norms.after_mlp)
        self.scale = c.residual_scale
        router = [Rows(own + many.router, every, many.count)]
        self.router = projection(tensors, router, c.hidden, many.stacked)
        before = tensors.counts.copy()
        self.layer = expert_weights.read(tensors, c, many, own)
        self.counts = tensors.counts - before  # elements by dtype, as the files have them
        if many.choice_bias:
            bias = [Rows(own + many.choice_bias, every, many.count)]
            bias_of_choice = tensors.get(bias, dtype=torch.float32)
            self.layer = replace(self.layer, choice_bias=bias_of_choice)
        self.inward = self.outward = None  # to the experts' own width, and back
        if many.latent:
            latent, hidden = range(many.latent), range(c.hidden)
            inward = [Rows(own + "fc1_latent_proj", latent, many.latent)]
            self.inward = projection(tensors, inward, c.hidden)
            outward = [Rows(own + "fc2_latent_proj", hidden, c.hidden)]
            self.outward = projection(tensors, outward, many.latent)
        self.shared: Dense | None = None
        self.gate: Projection | None = None  # of the shared expert
        if (shared := many.shared) is not None:
            self.shared = Dense(tensors, c, at + shared.at, shared.width)
            if shared.gate:
                self.gate = projection(tensors, [Rows(at + shared.gate, range(1), 1)], c.hidden)

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Those that are GEMMs of all rows, with kernels to choose from: of the gate's one output
        there are none."""
        others = (self.inward, self.outward)
        shared = () if self.shared is None else self.shared.projections
        return self.router, *shared, *(each for each in others if each is not None)

    def __call__(
        self, kernels: Kernels, x: Operand, residual: torch.Tensor, norm: Norm | None, given: Given
    ) -> Operand:
        """As MLP. Rows that are not `given` are padding, and are routed nowhere."""
        settled = kernels.gemms.settle(x)
        logits = kernels.gemms.project(Operand(settled), self.router).rows
        rows = settled
        if self.inward is not None:
            rows = kernels.gemms.project(Operand(settled), self.inward).rows
        made = kernels.experts.run(rows, logits, self.layer, self.routing, given)
        if self.outward is not None:  # of a rank's term, as of the sum
            made = kernels.gemms.project(Operand(made), self.outward).rows
        if self.shared is not None:
            made = made.add_(self._shared(kernels, self.shared, Operand(settled)))
        return kernels.gemms.join(made, Join(residual, self.after, norm, self.scale))

    def _shared(self, kernels: Kernels, shared: Dense, x: Operand) -> torch.Tensor:
        """The shared expert's output, of this rank's columns. [rows, hidden]"""
        made = shared.run(kernels, x, STORE).rows
        if self.gate is None:
            return made
        return made.mul_(kernels.gemms.project(x, self.gate).rows.sigmoid())
