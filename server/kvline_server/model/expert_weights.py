"""The weights of a layer's experts, from files that have a tensor for each expert's projection, or
one for those of all experts, where gate's rows are before up's, or take turns with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kvline_server.kernels.experts import ExpertWeight, Layer
from kvline_server.kernels.mxfp4 import BLOCK
from kvline_server.model.config import Experts, ModelConfig
from kvline_server.model.linear import Rows, Stacked, Tensors
from kvline_server.model.quantization import MXFP4_SCALES, MXFP4_VALUES


def read(tensors: Tensors, config: ModelConfig, many: Experts, at: str) -> Layer:
    """A rank's columns of every expert; `at` is the prefix of the tensors."""
    if many.stacked:
        return _stacked(tensors, config, many, at + "experts.")
    if many.together and (not many.names or tensors.source.has(at + many.together[0])):
        return _together(tensors, config, many, *(at + name for name in many.together))
    return _separate(tensors, config, many, at + "experts.")


def _separate(tensors: Tensors, config: ModelConfig, many: Experts, at: str) -> Layer:
    hidden, width = many.latent or config.hidden, config.expert_width
    columns = tensors.shard.of(width)
    *first, down = many.names
    inputs = [
        Rows(f"{at}{expert}.{name}.weight", columns, width)
        for expert in range(many.count)
        for name in first
    ]
    outputs = [
        Rows(f"{at}{expert}.{down}.weight", range(hidden), hidden) for expert in range(many.count)
    ]
    return Layer(tensors.get(inputs, hidden), tensors.get(outputs, width, columns))


def _together(
    tensors: Tensors, config: ModelConfig, many: Experts, gate_up: str, down: str
) -> Layer:
    hidden, width = config.hidden, config.expert_width
    columns = tensors.shard.of(width)
    both = [columns, range(width + columns.start, width + columns.stop)]
    sizes = (2 * width, hidden), (hidden, width)  # outputs and inputs
    inputs, outputs = (
        [
            Rows(name, rows, size[0], _stack(tensors, many, name, *size, expert))
            for expert in range(many.count)
            for rows in own
        ]
        for name, size, own in zip((gate_up, down), sizes, (both, [range(hidden)]), strict=True)
    )
    return Layer(tensors.get(inputs, hidden), tensors.get(outputs, width, columns))


def _stack(
    tensors: Tensors, many: Experts, name: str, outputs: int, inputs: int, expert: int
) -> Stacked:
    """One of all experts' matrices, with inputs before outputs where the tensor is so."""
    usual, other = (many.count, outputs, inputs), (many.count, inputs, outputs)
    turned = many.transposes and tensors.source.shape(name) == other != usual
    return Stacked(other if turned else usual, expert, turned)


def _stacked(tensors: Tensors, config: ModelConfig, many: Experts, at: str) -> Layer:
    hidden, width = config.hidden, config.intermediate
    columns = tensors.shard.of(width)
    both = [range(2 * columns.start + odd, 2 * columns.stop + odd, 2) for odd in (0, 1)]
    inputs = _Stack(tensors, many, at + "gate_up_proj", 2 * width, both)
    outputs = _Stack(tensors, many, at + "down_proj", hidden, [range(hidden)])
    gate_up, down = inputs.weight(hidden), outputs.weight(width, columns)
    return Layer(gate_up, down, inputs.bias(), outputs.bias(of_sum=True))


@dataclass(frozen=True, slots=True)
class _Stack:
    """A projection of all experts."""

    tensors: Tensors
    many: Experts
    name: str
    outputs: int  # of an expert, on all ranks
    rows: Sequence[range]  # this rank's of each expert, in their order

    def weight(self, inputs: int, own: range | None = None) -> ExpertWeight:
        """Of which the rank takes the `own` of all inputs if given."""
        count, tensors = self.many.count, self.tensors
        if not self.many.mxfp4:
            shape = count, inputs, self.outputs
            return tensors.get(self._parts("", shape, transposed=True), inputs, own)
        scaled = count, self.outputs, inputs // BLOCK
        values = self._parts(MXFP4_VALUES, (*scaled, BLOCK // 2))
        scales = self._parts(MXFP4_SCALES, scaled)
        return tensors.experts(values, scales, inputs, own)

    def bias(self, of_sum: bool = False) -> torch.Tensor | None:
        """[experts, rows]; what is added to a sum over ranks rank 0 alone has, and all check."""
        elsewhere = of_sum and self.tensors.shard.rank > 0
        parts = self._parts("_bias", (self.many.count, self.outputs))
        if elsewhere:
            parts = [replace(part, rows=range(0)) for part in parts]
        made = self.tensors.get(parts)
        return None if elsewhere else made.view(self.many.count, len(made) // self.many.count)

    def _parts(self, suffix: str, shape: tuple[int, ...], transposed: bool = False) -> list[Rows]:
        return [
            Rows(self.name + suffix, rows, self.outputs, Stacked(shape, expert, transposed))
            for expert in range(self.many.count)
            for rows in self.rows
        ]
