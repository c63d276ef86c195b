"""A model's blocks in their order: mixers, each with the blocks behind it up to the next mixer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvline_server.model import hybrid
from kvline_server.model.attention import Attention
from kvline_server.model.blocks import MLP
from kvline_server.model.config import ModelConfig
from kvline_server.model.delta_rule import DeltaRule
from kvline_server.model.experts import Experts
from kvline_server.model.linear import Tensors
from kvline_server.model.mamba import Mamba
from kvline_server.model.mixer import Mixer
from kvline_server.model.sequence import Kind

FeedForward = MLP | Experts


@dataclass(frozen=True, slots=True)
class Layer:
    """A mixer, and what follows it before the next one: mostly one block."""

    mixer: Mixer
    blocks: list[FeedForward] = field(default_factory=list)

    @property
    def kind(self) -> tuple[type, ...]:
        """The same of layers whose GEMMs have the same shapes."""
        return type(self.mixer), *map(type, self.blocks)


def read(tensors: Tensors, config: ModelConfig) -> tuple[list[FeedForward], list[Layer]]:
    """The blocks before the first mixer, in most models none; and the layers."""
    first: list[FeedForward] = []
    layers: list[Layer] = []
    for block in config.blocks:
        at = f"{config.names.decoder}layers.{block.layer}."
        if block.kind.mixes:
            layers.append(Layer(MIXERS[block.kind](tensors, config, at)))
        else:
            made = FEED_FORWARDS[block.kind](tensors, config, at)
            (layers[-1].blocks if layers else first).append(made)
    return first, layers


def _recurrent(tensors: Tensors, config: ModelConfig, at: str) -> Mixer:
    sizes = config.recurrent
    if isinstance(sizes, hybrid.DeltaRule):
        return DeltaRule(tensors, config, sizes, at)
    assert sizes is not None
    return Mamba(tensors, config, sizes, at)


MIXERS: dict[Kind, Callable[[Tensors, ModelConfig, str], Mixer]] = {
    Kind.ATTENTION: Attention,
    Kind.RECURRENT: _recurrent,
}
FEED_FORWARDS: dict[Kind, Callable[[Tensors, ModelConfig, str], FeedForward]] = {
    Kind.MLP: MLP,
    Kind.EXPERTS: Experts,
}
