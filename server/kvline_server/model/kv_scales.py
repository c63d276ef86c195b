"""The scales of an fp8 KV cache, of each layer one of its keys and one of its values.

Checkpoints that were calibrated for one have them beside the weights, as tensors of one number:
self_attn.k_scale and v_scale, in older ones k_proj.output_scale and v_proj.output_scale.
"""

from __future__ import annotations

import math

import torch

from kvline_server.errors import ModelInvalid
from kvline_server.memory.arena import Scales
from kvline_server.model.config import ModelConfig
from kvline_server.model.loader import SafetensorsSource

LEAST = torch.finfo(torch.float32).tiny  # the inverse of a smaller one may be infinite


def read(files: SafetensorsSource, model: ModelConfig) -> tuple[tuple[Scales, ...], int]:
    """The scales of each attention, 1 for those that no file has, and the number of these. Raises
    ModelInvalid for one that is no positive number."""
    names = model.names.found(files.has)
    places = [
        f"{names.decoder}layers.{layer}.{names.attention}" for layer in model.attentions.values()
    ]
    found = [[_scale(files, at, kind) for kind in ("k", "v")] for at in places]
    missing = sum(scale is None for pair in found for scale in pair)
    return tuple(Scales(*(1.0 if s is None else s for s in pair)) for pair in found), missing


def _scale(files: SafetensorsSource, at: str, kind: str) -> float | None:
    names = (f"{at}{kind}_scale", f"{at}{kind}_proj.output_scale")
    name = next((name for name in names if name in files.where), None)
    if name is None:
        return None
    stored = files.whole(name)
    if stored.numel() != 1:
        raise ModelInvalid(
            f"{files.where[name]}: tensor {name} has shape {list(stored.shape)}, an fp8 KV cache "
            "takes one scale for all heads of a layer, []"
        )
    scale = float(stored)
    if not (stored.is_floating_point() and LEAST <= scale < math.inf):
        raise ModelInvalid(
            f"{files.where[name]}: tensor {name} is {scale} ({stored.dtype}), the scale of an fp8 "
            "KV cache must be a positive, finite float"
        )
    return scale
