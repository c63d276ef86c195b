"""Mixtures of experts: small MLPs, of which each row has some."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from kvline_server.kernels.mxfp4 import NAN, Mxfp4Weight, PackedMxfp4, Packing
from kvline_server.kernels.routing import Played
from kvline_server.kernels.tuning import Choices

ExpertWeight = torch.Tensor | Mxfp4Weight | PackedMxfp4


@dataclass(frozen=True, slots=True)
class Layer:
    """The experts of a layer, one after the other in each weight; a rank's columns of all."""

    # [experts * 2 * width, hidden], an expert's gate before its up; or up alone
    gate_up: ExpertWeight
    down: ExpertWeight  # [experts * hidden, width]
    gate_up_bias: torch.Tensor | None = None  # [experts, 2 * width]
    down_bias: torch.Tensor | None = None  # [experts, hidden]; rank 0 alone has it
    # float32 [experts], added to the scores by which experts are chosen, and not weighed
    choice_bias: torch.Tensor | None = None

    @property
    def experts(self) -> int:
        return len(self.down) // self.gate_up.shape[1]

    @property
    def nbytes(self) -> int:
        parts = (self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def scales_nbytes(self) -> int:
        """Of them, those of the weights' scales."""
        weights = (self.gate_up, self.down)
        return sum(each.scales.nbytes for each in weights if not isinstance(each, torch.Tensor))


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router's logits become experts."""

    chosen: int  # of a row
    renormalise: bool  # the weights of the chosen ones add up to 1
    # Of the gate: silu, gelu_tanh, or swiglu_oai, which clamps both and adds 1 to up. Or relu2,
    # of up alone: then there is no gate.
    activation: str
    scores: str = "softmax"  # of the logits, over all experts; or sigmoid, of each
    scale: float = 1.0  # of the weights


@dataclass(frozen=True, slots=True)
class Given:
    """What experts are given of a step: its first rows, as the others are padding, and what stands
    in the place of the routers."""

    rows: int
    played: Played = Played.NOTHING
    # Both, in a captured graph: int32 [2], which each replay reads; then `rows` are all.
    on_device: torch.Tensor | None = None


class Experts(ABC):
    largest_scale: int = NAN - 1  # of a Mxfp4Weight, as published
    dequantises: bool = False  # a Mxfp4Weight, in every step

    def packing(self, rows: int, inputs: int, device: torch.device) -> Packing | None:
        """Of a weight of all experts of a layer, in the layout that is fastest; on PyTorch's device
        meta it has sizes alone. None where the weight stays as it is read."""
        return None

    @abstractmethod
    def run(
        self, x: torch.Tensor, logits: torch.Tensor, layer: Layer, routing: Routing, given: Given
    ) -> torch.Tensor:
        """The sum of each row's experts, an MLP each, by the weights that the router's logits give
        them; of a rank's columns, for Gemms.join. Padding has no expert.
        x [rows, hidden], logits [rows, experts] -> [rows, hidden]"""

    @abstractmethod
    def tune(
        self, layers: list[Layer], routing: Routing, rows: list[int], known: Choices | None
    ) -> None:
        """As Gemms.tune, which gives these choices among its own from then on. Does nothing where
        there is nothing to choose."""
