"""Engines over tiny models that see images, and what transformers answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
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
from kvline_server.kernels.interface import Kernels
from kvline_server.kernels.torch import TorchKernels
from kvline_server.memory.arena import Arena, HostArena, KVShape
from kvline_server.memory.device import cpu_device
from kvline_server.memory.states import BOUNDARY, StatePool
from kvline_server.model.config import read_config
from kvline_server.model.decoder import Decoder
from kvline_server.model.loader import SafetensorsSource, load_weights
from kvline_server.model.shard import Shard, local
from kvline_server.parallel.executor import Executor, Local
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
    kernels, bounds = kernels or TorchKernels(), bounds or bounds_of(family, step)
    rows = decode_rows(running, step, draft_tokens)
    alone = rank_of(family, kernels, bounds, step, running, pages, model_len, rows)
    found = over(alone, family, bounds, step, running, model_len, draft_tokens, mixed)
    if found.speculation is not None:
        found.speculation.costs = Free()
    return found


def bounds_of(family: str, step: int) -> Bounds:
    recurrent = read_config(vision_models.saved(family).folder).recurrent
    return Bounds.of(64, step, BOUNDARY if recurrent else 1)


def rank_of(
    family: str,
    kernels: Kernels,
    bounds: Bounds,
    step: int,
    running: int,
    pages: int,
    model_len: int,
    rows: int,
    arenas: Callable[[KVShape, int], Arena] = HostArena,
) -> Local:
    """The rank of the kernels' group."""
    own, shard = vision_models.saved(family), Shard(kernels.group.rank, kernels.group.ranks)
    config, vision, source = read_config(own.folder), own.config, SafetensorsSource(own.folder)
    weights = load_weights(
        source, config, kernels, shard=shard, vision=vision, encoded=bounds.cached
    )
    mine = local(config, shard)
    decoder = Decoder(mine, weights, model_len, kernels, step, len(vision.deepstack))
    assert weights.tower is not None
    encoder = Encoder(weights.tower, decoder, vision_models.BY)
    kept, slots = kernels.dtype, 1 + running + 8
    arena = mapped(decoder, model_len, pages, kept, slots=slots, arenas=arenas)
    worker = Worker(decoder, arena, 64, running, rows)
    return Local(worker, cpu_device(None, os.getpid()), encoder)


def over(
    executor: Executor,
    family: str,
    bounds: Bounds,
    step: int,
    running: int,
    model_len: int,
    draft_tokens: int = 0,
    mixed: int | None = None,
) -> Engine:
    own = vision_models.saved(family)
    config = read_config(own.folder)
    assert executor.encoder is not None
    return Engine(
        executor,
        running,
        step,
        model_len,
        config.eos_token_ids,
        mixed,
        draft_tokens=draft_tokens,
        states=StatePool(running, 8) if config.recurrent else None,
        encoding=Encoding(
            executor.encoder,
            bounds,
            step,
            config.vocabulary,
            executor.ranks,
            own.config.two_way,
        ),
    )


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
