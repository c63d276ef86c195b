"""Captured graphs equal eager steps, for any number of requests and with padding rows."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pairs import sequence, sides

from kvline_server.engine.batch import build
from kvline_server.engine.request import Sequence
from kvline_server.engine.scheduler import Work
from kvline_server.kernels.interface import SlotMapping
from kvline_server.memory.arena import Arena, Scales
from kvline_server.model.config import Experts, ModelConfig
from kvline_server.model.decoder import Decoder
from kvline_server.model.quantization import Quantization
from kvline_server.worker.decode_graphs import DecodeGraphs
from kvline_server.worker.graphs import GraphSegments
from kvline_server.worker.step import Step

pytestmark = pytest.mark.gpu


FP8_CACHE = (Scales(0.02, 0.03),) * 3
BY_CHANNEL, IN_BLOCKS = Quantization("_scale", None), Quantization("_scale_inv", (128, 128))
MIXTURE = {"experts": Experts(16, 4, True, "mlp."), "intermediate": 256}
MODELS = pytest.mark.parametrize(
    ("more", "scales", "most"),
    # Of fp8 weights, rows that a graph pads may have another tile, whose rounding the next layer
    # amplifies. A near tie of two experts may end otherwise in a GEMM of another row count.
    [
        ({}, (), 1e-2),
        ({}, FP8_CACHE, 1e-2),
        ({"quantization": BY_CHANNEL}, (), 3e-2),
        ({"quantization": IN_BLOCKS}, (), 3e-2),
        ({"quantization": IN_BLOCKS}, FP8_CACHE, 3e-2),
        (MIXTURE, (), 5e-2),
        (MIXTURE, FP8_CACHE, 5e-2),
    ],
    ids=["bf16", "fp8-cache", "channel", "block", "block-cache", "experts", "experts-cache"],
)


@MODELS
def test_replay_is_eager_for_one_request_and_for_many(
    more: dict[str, Any],
    scales: tuple[Scales, ...],
    most: float,
    shape: Callable[..., ModelConfig],
) -> None:
    """Of the rows of a mixture most are the same to within rounding."""
    decoder, arena = sides(shape(128, True, **more), scales=scales)[1]
    segments = GraphSegments(decoder, arena.layers(), 512)
    rng = np.random.default_rng(5)
    for number, rows in ((1, 500), (17, 28), (2, 100), (60, 1), (7, 9)):
        free = rng.permutation(np.arange(1, 400)).tolist()
        members: list[Sequence] = [sequence(rng, rows, free) for _ in range(number)]
        step = build([Work(s, 0, rows) for s in members]).step
        kernels, layout = decoder.kernels, step.layout
        ids, positions, slots = kernels.upload(step.tokens, layout.positions, layout.slots)
        where, layers = SlotMapping(positions, slots), arena.layers()
        wanted = torch.randperm(number * rows, device="cuda")[: max(1, number * rows // 3)]
        segments.attended.fill_(float("nan"))  # what an earlier, larger step left must not matter
        with torch.inference_mode():
            replayed = segments.step(ids, where, layers, layout, wanted).clone()
            eager = decoder.step(ids, where, layers, layout, wanted)
        distance = float((replayed - eager).float().norm() / eager.float().norm())
        assert distance < most, (number, rows, distance)
        if "experts" in more:
            each = (replayed - eager).float().norm(dim=1) / eager.float().norm(dim=1)
            assert float(each.median()) < 1e-2, (number, rows)


def test_no_garbage_is_collected_during_a_capture(shape: Callable[..., ModelConfig]) -> None:
    """An engine's graphs are freed with it by the garbage collector, which ends a capture with an
    error. Here it would run at every few new objects."""
    decoder, arena = sides(shape())[1]
    capturing: list[bool] = []

    def note(phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            capturing.append(torch.cuda.is_current_stream_capturing())

    often = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(1)
    try:
        GraphSegments(decoder, arena.layers(), 64)
    finally:
        gc.set_threshold(*often)
        gc.callbacks.remove(note)
    assert capturing and not any(capturing)


def test_graphs_survive_growth_of_the_arena(shape: Callable[..., ModelConfig]) -> None:
    decoder, arena = sides(shape(), most=50_000)[1]
    segments = GraphSegments(decoder, arena.layers(), 64)
    rng = np.random.default_rng(6)
    work = [Work(sequence(rng, 40, list(range(1, 400))), 0, 40)]
    step = build(work).step
    outs = []
    for pages in (400, 50_000, 400):
        arena.resize(pages)
        kernels = decoder.kernels
        ids, positions, slots = kernels.upload(
            step.tokens, step.layout.positions, step.layout.slots
        )
        with torch.inference_mode():
            where, wanted = SlotMapping(positions, slots), torch.arange(40, device="cuda")
            outs.append(segments.step(ids, where, arena.layers(), step.layout, wanted).clone())
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[1], outs[2])


@MODELS
@pytest.mark.parametrize(
    ("kv_heads", "numbers"), [(2, (64, 1, 3, 33, 8, 2, 64)), (8, (800, 1, 160, 300, 40, 512, 800))]
)
def test_whole_steps_of_decodes_are_eager_ones(
    kv_heads: int,
    numbers: tuple[int, ...],
    more: dict[str, Any],
    scales: tuple[Scales, ...],
    most: float,
    shape: Callable[..., ModelConfig],
) -> None:
    """For any number of decodes, of any lengths, over one cache that grows; a token that the host
    has not read is taken on the device. Many rows of eight heads leave no block of the GPU idle,
    and attention is then captured without splitting a sequence."""
    decoder, arena = sides(shape(128, True, kv_heads=kv_heads, **more), 20_000, scales)[1]
    last = torch.arange(100, 1000, device="cuda")
    plan = decoder.kernels.plan_in_place
    assert plan is not None
    graphs = DecodeGraphs(decoder, plan, arena.layers(), last, 4096)
    arena.resize(20_000)
    rng = np.random.default_rng(8)
    for number in numbers:
        free = rng.permutation(np.arange(1, 20_000)).tolist()
        members = [sequence(rng, int(n), free) for n in rng.integers(1, 600, number)]
        for slot, member in enumerate(members):
            member.slot = slot + 5
            member.prompt_length = len(member.tokens)
            if len(member.tokens) > 1:
                forward(decoder, arena, build([Work(member, 0, len(member.tokens) - 1)]).step)
        unread = members[0]
        unread.pending, length = 1, len(unread.tokens)
        read = unread.tokens.pop()
        last[unread.slot] = read
        work = [Work(m, len(m.tokens) + m.pending - 1, 1) for m in members]
        assert work[0].start == length - 1
        step = build(work).step
        assert graphs.fits(step)
        with torch.inference_mode():
            got = graphs.run(step).clone()
        unread.tokens.append(read)
        unread.pending = 0
        want = forward(decoder, arena, build(work).step)
        distance = float((got - want).float().norm() / want.float().norm())
        assert distance < most, (number, distance)


def forward(decoder: Decoder, arena: Arena, step: Step) -> torch.Tensor:
    ids, positions, slots = decoder.kernels.upload(
        step.tokens, step.layout.positions, step.layout.slots
    )
    wanted = torch.arange(len(ids), device=ids.device)
    with torch.inference_mode():
        out: torch.Tensor = decoder.step(
            ids, SlotMapping(positions, slots), arena.layers(), step.layout, wanted
        )
    return out
