"""Engines over tiny models that see images, and what transformers answers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import vision_models
from engines import Free, mapped
from vision_models import IMAGE, PATCH, Picture

from kvline_server.engine.encoding import Bounds, Encoding
from kvline_server.engine.engine import Engine
from kvline_server.engine.pictures import Image, Pictures
from kvline_server.engine.speculation import decode_rows
from kvline_server.images.digests import digest
from kvline_server.images.positions import Placed, mrope
from kvline_server.kernels.torch import TorchKernels
from kvline_server.memory.device import cpu_device
from kvline_server.memory.states import BOUNDARY, StatePool
from kvline_server.model.config import read_config
from kvline_server.model.decoder import Decoder
from kvline_server.model.loader import SafetensorsSource, load_weights
from kvline_server.parallel.executor import Local
from kvline_server.worker.encoder import Encoder
from kvline_server.worker.worker import Worker

# The last two have images that are not cut.
FAMILIES = (*vision_models.FAMILIES, "gemma3_large")
SIDE = 2 * PATCH  # pixels of a token's side
Part = int | Picture  # a token, or an image


def engine(
    family: str,
    step: int = 64,
    running: int = 4,
    pages: int = 60,
    bounds: Bounds | None = None,
    model_len: int = 400,
    kernels: TorchKernels | None = None,
    draft_tokens: int = 0,
    mixed: int | None = None,
) -> Engine:
    own = vision_models.saved(family)
    config, vision, kernels = read_config(own.folder), own.config, kernels or TorchKernels()
    bounds = bounds or Bounds.of(64, step, BOUNDARY if config.recurrent else 1)
    source = SafetensorsSource(own.folder)
    weights = load_weights(source, config, kernels, vision=vision, encoded=bounds.cached)
    decoder = Decoder(config, weights, model_len, kernels, step, len(vision.deepstack))
    assert weights.tower is not None
    encoder = Encoder(weights.tower, decoder, vision_models.BY)
    arena = mapped(decoder, model_len, pages, slots=1 + running + 8)
    rows = decode_rows(running, step, draft_tokens)
    found = Engine(
        Local(Worker(decoder, arena, 64, running, rows), cpu_device(None, os.getpid())),
        running,
        step,
        model_len,
        config.eos_token_ids,
        mixed,
        draft_tokens=draft_tokens,
        states=StatePool(running, 8) if config.recurrent else None,
        encoding=Encoding(encoder, bounds, step, config.vocabulary, vision.two_way),
    )
    if found.speculation is not None:
        found.speculation.costs = Free()
    return found


def prompt(
    parts: Sequence[Part], axes: bool = True, side: int = SIDE
) -> tuple[list[int], Pictures]:
    """Of tokens and images, as HTTP sends it; `side` is of a token, in pixels."""
    tokens: list[int] = []
    images: list[Image] = []
    placed: list[Placed] = []
    for part in parts:
        if isinstance(part, int):
            tokens.append(part)
            continue
        rows, columns = part.shape[0] // side, part.shape[1] // side
        images.append(Image(len(tokens), rows * columns, digest(part), part))
        placed.append(Placed(len(tokens), rows, columns))
        tokens += [IMAGE] * (rows * columns)
    if not axes:
        return tokens, Pictures(tuple(images))
    positions, shift = mrope(len(tokens), placed)
    return tokens, Pictures(tuple(images), positions.astype(np.int64), shift)


def prompt_of(family: str, parts: Sequence[Part]) -> tuple[list[int], Pictures]:
    vision = vision_models.saved(family).config
    return prompt(parts, axes=not vision.two_way, side=vision.factor)


def of_family(family: str, parts: Sequence[Part]) -> list[Part]:
    """With images of the one size that Gemma takes, of which equal ones stay equal."""
    if not family.startswith("gemma3"):
        return list(parts)
    side = 8 * PATCH
    return [p if isinstance(p, int) else vision_models.picture(side, side, p.size) for p in parts]


@torch.inference_mode()
def logits(
    family: str, parts: Sequence[Part], tokens: list[int], answer: list[int]
) -> torch.Tensor:
    """transformers', of a prompt and what followed it. -> [tokens, vocabulary]"""
    model = vision_models.saved(family).model
    whole = torch.tensor([tokens + answer])
    images = [part for part in parts if not isinstance(part, int)]
    given: dict[str, Any] = {}
    if images:
        given = dict(vision_models.pixel_values(family, images))
        types = "token_type_ids" if family.startswith("gemma3") else "mm_token_type_ids"
        given[types] = (whole == IMAGE).int()
    found: torch.Tensor = model(input_ids=whole, **given).logits[0]
    return found
