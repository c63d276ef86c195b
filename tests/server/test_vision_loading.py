"""A tower beside the text model's weights."""

from __future__ import annotations

import torch
from vision_models import saved, tensors

from kvline_contract.memory import TOWER, WEIGHTS
from kvline_server.kernels.torch import TorchKernels
from kvline_server.model import loader
from kvline_server.model.config import read_config
from kvline_server.model.loader import SafetensorsSource, load_weights


def test_a_tower_is_loaded_where_it_is_asked_for_and_changes_nothing_else() -> None:
    """Its bytes are a part of their own."""
    folder, vision = saved("qwen3_5").folder, saved("qwen3_5").config
    source, config, kernels = SafetensorsSource(folder), read_config(folder), TorchKernels()
    plain = load_weights(source, config, kernels)
    made = load_weights(source, config, kernels, vision=vision)
    assert plain.tower is None and made.tower is not None
    size = sum(each.nbytes for each in tensors(made.tower))
    assert made.nbytes(torch.float32) == plain.nbytes(torch.float32) + size
    counted = loader.checked(source, config, kernels=kernels, vision=vision)
    assert counted.nbytes(torch.float32) == made.nbytes(torch.float32)
    parts, before = ({p.name: p.fixed for p in of.parts()} for of in (made, plain))
    assert parts == before | {TOWER: size} and parts[WEIGHTS] > 0
    assert torch.equal(made.embedding, plain.embedding)
    assert "tensors model.visual.* are not loaded" in loader.left_out(source, config)
    assert loader.left_out(source, config, vision) == ""
