"""Mixtures of experts on a GPU (cuda_experts.py), in the group's memory."""

from __future__ import annotations

from functools import partial

import torch

from kvline_server.kernels import cuda_mxfp4
from kvline_server.kernels.cuda_experts import ExpertGemms
from kvline_server.kernels.cuda_mxfp4 import LARGEST, Mxfp4Gemms
from kvline_server.kernels.experts import Experts, Given, Layer, Routing
from kvline_server.kernels.formats import replay_time
from kvline_server.kernels.group import Group
from kvline_server.kernels.mxfp4 import PackedMxfp4, Packing
from kvline_server.kernels.rows import Rows
from kvline_server.kernels.tuning import Choices


class GpuExperts(Experts):
    largest_scale = LARGEST

    def __init__(self, choices: Choices, rows: Rows, group: Group) -> None:
        """`choices` are those of all GEMMs."""
        self.group = group
        self._plain = ExpertGemms(choices, rows.activate_and_mul)
        self._mxfp4 = Mxfp4Gemms(choices, rows.activate_and_mul)

    def packing(self, rows: int, inputs: int, device: torch.device) -> Packing:
        made = cuda_mxfp4.packing(rows, inputs, device)
        return Packing(made, partial(cuda_mxfp4.pack, made))

    def run(
        self, x: torch.Tensor, logits: torch.Tensor, layer: Layer, routing: Routing, given: Given
    ) -> torch.Tensor:
        return self._gemms(layer).run(x, logits, layer, routing, given, self.group.buffer(*x.shape))

    def tune(
        self, layers: list[Layer], routing: Routing, rows: list[int], known: Choices | None
    ) -> None:
        self._gemms(layers[0]).tune(layers, routing, rows, known, replay_time)

    def _gemms(self, layer: Layer) -> ExpertGemms:
        """Those of the weights' format."""
        return self._mxfp4 if isinstance(layer.gate_up, PackedMxfp4) else self._plain
