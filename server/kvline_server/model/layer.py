"""A decoder layer: attention, then an MLP or a mixture of experts."""

from __future__ import annotations

from kvline_server.model.blocks import MLP, Attention
from kvline_server.model.config import ModelConfig
from kvline_server.model.experts import Experts
from kvline_server.model.linear import Tensors


class Layer:
    def __init__(self, tensors: Tensors, config: ModelConfig, index: int) -> None:
        at = f"model.layers.{index}."
        self.attention = Attention(tensors, config, at, index)
        self.mlp: MLP | Experts
        if config.experts is None:
            self.mlp = MLP(tensors, config, at)
        else:
            self.mlp = Experts(tensors, config, at)
