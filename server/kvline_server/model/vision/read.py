"""Which tower a configuration is of. Its weights are declared as those of a text model's blocks, so
names and shapes are checked before anything is copied."""

from __future__ import annotations

from collections.abc import Callable

from kvline_server.model.linear import Tensors
from kvline_server.model.vision.config import VisionConfig
from kvline_server.model.vision.qwen2_5 import Qwen25
from kvline_server.model.vision.qwen3 import Qwen3
from kvline_server.model.vision.siglip import Siglip
from kvline_server.model.vision.tower import Tower

TOWERS: dict[str, Callable[[Tensors, VisionConfig], Tower]] = {
    "qwen3": Qwen3,
    "qwen2_5": Qwen25,
    "siglip": Siglip,
}


def read_tower(tensors: Tensors, config: VisionConfig) -> Tower:
    """Whole, whatever the rank."""
    before = tensors.elements
    made = TOWERS[config.kind](tensors, config)
    made.elements = tensors.elements - before
    return made
