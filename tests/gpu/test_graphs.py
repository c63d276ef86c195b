"""Captured graphs equal eager steps, for any number of requests and with padding rows."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pairs import GEMMA, captured, forward, sequence, sides, slide

from kvline_server.engine.batch import build
from kvline_server.engine.request import Sequence
from kvline_server.engine.work import Kind, Work
from kvline_server.memory.arena import Scales
from kvline_server.model.config import Experts, ModelConfig
from kvline_server.model.quantization import Quantization

pytestmark = pytest.mark.gpu


FP8_CACHE = (Scales(0.02, 0.03),) * 3
BY_CHANNEL, IN_BLOCKS = Quantization("_scale", None), Quantization("_scale_inv", (128, 128))
MIXTURE = {"experts": Experts(16, 4, True, "mlp."), "intermediate": 256}
MODELS = pytest.mark.parametrize(
    ("more", "scales", "most"),
    # Of fp8 weights, rows that a graph pads may have another tile, whose rounding the next layer
    # amplifies, and so do a Gemma's norms after each block. A near tie of two experts may end
    # otherwise in a GEMM of another row count.
    [
        ({}, (), 1e-2),
        ({}, FP8_CACHE, 1e-2),
        ({"quantization": BY_CHANNEL}, (), 3e-2),
        ({"quantization": IN_BLOCKS}, (), 3e-2),
        ({"quantization": IN_BLOCKS}, FP8_CACHE, 3e-2),
        (MIXTURE, (), 5e-2),
        (MIXTURE, FP8_CACHE, 5e-2),
        (GEMMA, (), 3e-2),
        (GEMMA, FP8_CACHE, 5e-2),
    ],
    ids=[
        *("bf16", "fp8-cache", "channel", "block", "block-cache", "experts", "experts-cache"),
        *("gemma", "gemma-cache"),
    ],
)


@MODELS
def test_replay_is_eager_for_one_request_and_for_many(
    more: dict[str, Any],
    scales: tuple[Scales, ...],
    most: float,
    shape: Callable[..., ModelConfig],
) -> None:
    """Of the rows of a mixture most are the same to within rounding."""
    decoder, arena = sides(shape(qk_norm=True, **more), scales=scales)[1]
    segments = captured(decoder, arena, 512).segments
    rng = np.random.default_rng(5)
    for number, rows in ((1, 500), (17, 28), (2, 100), (60, 1), (7, 9)):
        free = rng.permutation(np.arange(1, 400)).tolist()
        members: list[Sequence] = [
            sequence(rng, rows, free, len(decoder.windows)) for _ in range(number)
        ]
        logits_indices = rng.permutation(number * rows)[: max(1, number * rows // 3)]
        kind = Kind.PROMPT if rows > 1 else Kind.DECODE
        step = replace(
            build([Work(s, 0, rows, kind) for s in members]).step, logits_indices=logits_indices
        )
        segments.made.fill_(float("nan"))  # what an earlier, larger step left must not matter
        with torch.inference_mode():
            replayed = segments.run(step).clone()
        eager = forward(decoder, arena, step)
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
        captured(decoder, arena, 64)
    finally:
        gc.set_threshold(*often)
        gc.callbacks.remove(note)
    assert capturing and not any(capturing)


def test_graphs_survive_growth_of_the_arena(shape: Callable[..., ModelConfig]) -> None:
    decoder, arena = sides(shape(), most=50_000)[1]
    graphs = captured(decoder, arena, 64)
    rng = np.random.default_rng(6)
    work = [Work(sequence(rng, 40, list(range(1, 400))), 0, 40, Kind.PROMPT)]
    step = replace(build(work).step, logits_indices=np.arange(40))
    outs = []
    for pages in (400, 50_000, 400):
        arena.resize((pages,))
        with torch.inference_mode():
            outs.append(graphs.run(step).clone())
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
    decoder, arena = sides(shape(qk_norm=True, kv_heads=kv_heads, **more), 20_000, scales)[1]
    last = torch.arange(100, 1000, device="cuda")
    graphs = captured(decoder, arena, 64, last)
    arena.resize((20_000,) * len(decoder.windows))
    rng = np.random.default_rng(8)
    for number in numbers:
        free = rng.permutation(np.arange(1, 20_000)).tolist()
        lengths, groups = rng.integers(1, 600, number), len(decoder.windows)
        members = [sequence(rng, int(n), free, groups) for n in lengths]
        for index, member in enumerate(members):
            member.request_index = index + 5
            member.prompt_length = len(member.tokens)
            if len(member.tokens) > 1:
                before = build([Work(member, 0, len(member.tokens) - 1, Kind.PROMPT)]).step
                forward(
                    decoder, arena, replace(before, logits_indices=np.arange(len(before.tokens)))
                )
        unread = members[0]
        unread.pending, length = 1, len(unread.tokens)
        read = unread.tokens.pop()
        last[unread.request_index] = read
        work = [Work(m, len(m.tokens) + m.pending - 1, 1, Kind.DECODE) for m in members]
        assert work[0].start == length - 1
        for item in work:
            slide(item.sequence, decoder, item.start)
        step = build(work).step
        assert graphs.whole.fits(step)
        with torch.inference_mode():
            got = graphs.run(step).clone()
        unread.tokens.append(read)
        unread.pending = 0
        want = forward(decoder, arena, build(work).step)
        distance = float((got - want).float().norm() / want.float().norm())
        assert distance < most, (number, distance)
