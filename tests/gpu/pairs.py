"""The same model on CPU and GPU, and sequences over scattered pages."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from kvline_server.engine.batch import build
from kvline_server.engine.engine import Engine
from kvline_server.engine.request import Sequence
from kvline_server.engine.speculation import decode_rows
from kvline_server.engine.work import Work
from kvline_server.ipc.sampling_params import SamplingParams
from kvline_server.kernels.attention import SlotMapping
from kvline_server.kernels.fp8 import FP8
from kvline_server.kernels.interface import Kernels
from kvline_server.kernels.layout import Spans
from kvline_server.kernels.torch import TorchKernels
from kvline_server.memory.arena import HostArena, Scales
from kvline_server.memory.caches import GroupPages, PageTable
from kvline_server.memory.groups import GroupedArena, first_page, order
from kvline_server.memory.pages import PAGE_SIZE, pages_for
from kvline_server.model.config import ModelConfig, Norms
from kvline_server.model.decoder import Decoder, cache_groups
from kvline_server.model.linear import Rows
from kvline_server.model.loader import SCALE, RandomSource, load_weights
from kvline_server.model.positions import Rope
from kvline_server.parallel.executor import Local
from kvline_server.worker.graphs.graphs import Graphs
from kvline_server.worker.inputs import upload
from kvline_server.worker.step import Step
from kvline_server.worker.worker import Worker

PAGES = 400
# What a small model needs to be a Gemma 3, beside norms of query and key.
GEMMA: dict[str, Any] = {
    "head_dim": 256,
    "windows": (40, 0, 100),
    "local_rope": Rope(10_000.0),
    "softmax_scale": 1 / 40,
    "norms": Norms("before", "after", "before_mlp", "after_mlp", offset=1.0),
    "activation": "gelu_tanh",
    "embedding_scale": 512**0.5,
}


class SameOnBoth(RandomSource):
    """Drawn on the CPU in float32, whatever they are copied to; what one side keeps in fp8 is what
    that stands for on the other."""

    def copy(self, part: Rows, into: torch.Tensor, column: int = 0) -> None:
        fp8 = self.fp8(part.name) is not None and part.name.endswith("_proj.weight")
        kind = into.dtype if into.dtype == torch.uint8 else torch.float32  # MXFP4, or plain
        drawn = torch.empty(into.shape, dtype=FP8 if fp8 else kind)
        super().copy(part, drawn, column)
        into.copy_(drawn.float() * SCALE if fp8 and into.dtype != FP8 else drawn)


def windows_of(config: ModelConfig, longest: int = 4096) -> tuple[int, ...]:
    return tuple(order(config.every_window, longest))


def sides(
    config: ModelConfig,
    most: int = PAGES,
    scales: tuple[Scales, ...] = (),
    two_way: bool = False,
) -> list[tuple[Decoder, GroupedArena]]:
    """The same random model on the CPU in float32 and on the GPU in bfloat16; with scales the KV
    cache of both is fp8; `two_way`: for layouts with spans."""
    from kvline_server.kernels.flashinfer import FlashInferKernels
    from kvline_server.memory.cuda import CudaArena

    made: list[tuple[Decoder, GroupedArena]] = []
    heads, windows = (config.heads, config.kv_heads, config.head_dim), windows_of(config)
    cache = torch.float8_e4m3fn if scales else torch.bfloat16
    pairs: list[tuple[Kernels, Any]] = [
        (TorchKernels(), HostArena),
        (FlashInferKernels(*heads, cache=cache, windows=windows, two_way=two_way), CudaArena),
    ]
    for kernels, arena_of in pairs:
        dtype = cache if scales else kernels.dtype
        groups = cache_groups(config, 4096, dtype, scales)
        arena = GroupedArena(groups, arena_of, most * max(each.page_bytes for each in groups))
        arena.resize((PAGES,) * len(groups))
        weights = load_weights(SameOnBoth(config.quantization), config, kernels)
        made.append((Decoder(config, weights, 4096, kernels), arena))
    return made


def hidden(
    side: tuple[Decoder, GroupedArena], work: list[Work], spans: Spans | None = None
) -> torch.Tensor:
    decoder, arena = side
    for item in work:
        slide(item.sequence, decoder, item.start)
    step = build(work).step
    layout = replace(step.layout, spans=spans)
    held = (group.slots for group in layout.groups)
    ids, positions, *slots = decoder.kernels.upload(step.tokens, layout.positions, *held)
    mappings = [SlotMapping(positions, each) for each in slots]
    plans = decoder.plan(layout)
    every = torch.arange(len(ids), device=ids.device)
    with torch.inference_mode():
        out = decoder.forward(ids, mappings, arena.layers(), plans, every)
        return decoder.compute_logits(out).float().cpu()


def worker(made: Engine) -> Worker:
    """The worker of an engine whose device is in this process."""
    assert isinstance(made.executor, Local)
    return made.executor.worker


def engine(
    config: ModelConfig,
    pages: int = PAGES,
    running: int = 16,
    step: int = 256,
    scales: tuple[Scales, ...] = (),
    draft_tokens: int = 0,
) -> Engine:
    """An engine on the GPU with graphs, without a profile loop."""
    from kvline_server.memory.cuda import CudaDevice

    decoder, arena = sides(config, max(PAGES, pages), scales)[1]
    arena.resize((pages,) * len(arena.pages))
    rows = decode_rows(running, step, draft_tokens)
    executor = Local(Worker(decoder, arena, 64, running, rows), CudaDevice())
    executor.capture(step, 4096)
    return Engine(executor, running, step, 4096, (), draft_tokens=draft_tokens)


def sequence(rng: np.random.Generator, length: int, free: list[int], groups: int = 1) -> Sequence:
    """With the same page numbers in each group of layers."""
    tokens = rng.integers(0, 5000, length).tolist()
    made = Sequence(0, tokens, length, SamplingParams(max_tokens=1))
    pages = array("i", [free.pop() for _ in range(pages_for(length))])
    made.table = PageTable(tuple(GroupPages(0, pages[:]) for _ in range(groups)), len(pages))
    return made


def slide(member: Sequence, decoder: Decoder, position: int) -> None:
    """Gives up the pages that no query from this position on sees."""
    for group, window in zip(member.table.groups, decoder.windows, strict=True):
        first = first_page(window, position // PAGE_SIZE)
        del group.pages[: first - group.first]
        group.first = first


def captured(
    decoder: Decoder, arena: GroupedArena, max_rows: int, last_tokens: torch.Tensor | None = None
) -> Graphs:
    plan = decoder.kernels.attention.plan_in_place
    assert plan is not None
    if last_tokens is None:
        last_tokens = torch.zeros(1, dtype=torch.int64, device="cuda")
    return Graphs(decoder, plan, arena, last_tokens, len(last_tokens), max_rows, 4096)


def forward(decoder: Decoder, arena: GroupedArena, step: Step) -> torch.Tensor:
    """Eager: without graphs."""
    ids, mapping, logits_indices = upload(decoder, step, torch.empty(0))
    with torch.inference_mode():
        out: torch.Tensor = decoder.step(ids, mapping, arena.layers(), step.layout, logits_indices)
    return out
