"""Images whose tokens see each other (Gemma 3's) on a GPU: attention against float64, a model
against the CPU's, and segments against eager steps. An engine: test_image_engine.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from float64_attention import expected
from oracle import attention, filled, near
from pairs import GEMMA, captured, forward, hidden, sequence, sides
from spanned import Prompt, spanned

from kvline_server.engine.batch import build
from kvline_server.engine.work import Kind, Work
from kvline_server.kernels.fp8 import FP8
from kvline_server.kernels.layout import Spans
from kvline_server.memory.arena import Scales
from kvline_server.model.config import ModelConfig

pytestmark = pytest.mark.gpu
# With a window, of 100 tokens or more than an image has, kernels are other modules.
WINDOWS = pytest.mark.parametrize("windows", [(0,), (100, 1024)], ids=["all", "windows"])
# Queries, keys and values, size: of Gemma 3's 4B, 12B and 27B, and of many queries a key.
SHAPES = [(8, 4, 256), (16, 8, 256), (32, 16, 128), (8, 1, 256)]
CACHES = pytest.mark.parametrize("cache", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
IMAGE = 256
DECODES = ((1, 1), (16, 1), (700, 1), (1025, 1), (90, 4))  # the last with draft tokens
PROMPTS: tuple[Prompt, ...] = (
    (0, (17, -IMAGE, 30)),  # text before and behind
    (0, (-IMAGE, -IMAGE, 5)),  # two without a token between
    (0, (40, -IMAGE, 3, -IMAGE)),
    (3000, (-IMAGE, 9)),  # in a later chunk
    (990, (4, -IMAGE)),
    (0, (300,)),  # text alone
    (37, (2, -4, 1, -64, 5, -100)),  # of other sizes
)
FAR: Prompt = (20_000, (-IMAGE,))  # few rows of many pages: with an fp8 cache without a copy
STEPS: tuple[tuple[tuple[tuple[int, int], ...], tuple[Prompt, ...]], ...] = (
    ((), PROMPTS[:1]),
    ((), PROMPTS[3:4]),
    ((), (FAR,)),
    ((), ((20_000, (3, -IMAGE, 2)),)),
    ((), PROMPTS),
    (DECODES, PROMPTS),
    (DECODES, PROMPTS[4:5]),
)


@CACHES
@WINDOWS
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_of_an_image_see_each_other_and_those_before(
    shape: tuple[int, int, int], windows: tuple[int, ...], cache: torch.dtype
) -> None:
    torch.manual_seed(1)
    ours, layer = attention(shape, cache, windows, two_way=True), filled(shape, cache)
    queries, keys, dim = shape
    for decodes, prompts in STEPS:
        layout = spanned(decodes, prompts)
        fused = torch.randn(layout.rows, queries + 2 * keys, dim, device="cuda").bfloat16()
        q, scale = fused[:, :queries], 0.7 * dim**-0.5
        plans = {window: ours.plan(layout, 0, window) for window in windows}  # as of one step
        for window, plan in plans.items():
            got = ours.attend(q, layer, plan, scale=scale)
            near(got, expected(q, layer, layout, window, scale), (window, decodes, prompts))
            if cache == FP8:
                copied = plan.parts[-1].planned.copied
                assert (copied is None) == (prompts[0][0] == FAR[0]), "both ways are tried"


def images(*pairs: tuple[int, int]) -> Spans:
    return Spans(*np.array(pairs, np.int32).T)


FP8_CACHE = (Scales(0.02, 0.02),) * 3


@pytest.mark.parametrize(
    ("more", "scales", "most"),
    [({}, (), 2e-2), ({}, FP8_CACHE, 5e-2), (GEMMA, (), 4e-2), (GEMMA, FP8_CACHE, 0.1)],
    ids=["bf16", "fp8-cache", "gemma", "gemma-cache"],
)
def test_a_model_is_near_the_reference(
    more: dict[str, Any],
    scales: tuple[Scales, ...],
    most: float,
    shape: Callable[..., ModelConfig],
) -> None:
    """Bounds are those without images (test_kernels.py, test_kv_cache.py). A Gemma's windows are of
    40 and 100 tokens, images of up to 120."""
    both = sides(shape(qk_norm=True, **more), scales=scales, two_way=True)
    rng = np.random.default_rng(3)
    free = rng.permutation(np.arange(1, 400)).tolist()
    a, b = (sequence(rng, n, free, len(both[0][0].windows)) for n in (200, 500))
    for work, spans in (
        (
            [Work(a, 0, 199, Kind.PROMPT), Work(b, 0, 300, Kind.PROMPT)],
            images((20, 60), (60, 140), (199, 319), (400, 499)),
        ),
        (
            [Work(a, 199, 1, Kind.DECODE), Work(b, 300, 199, Kind.PROMPT)],
            images((1, 81), (100, 180)),
        ),
    ):
        want, got = (hidden(side, work, spans) for side in both)
        assert float((got - want).norm() / want.norm()) < most
    causal = hidden(both[0], work)
    assert float((causal - want).norm() / want.norm()) > 2 * most, "images do not show"


@pytest.mark.parametrize("scales", [(), FP8_CACHE], ids=["bf16", "fp8-cache"])
@pytest.mark.parametrize("more", [{}, GEMMA], ids=["all", "gemma"])
def test_steps_with_images_run_on_segments_as_eager_ones_do(
    more: dict[str, Any], scales: tuple[Scales, ...], shape: Callable[..., ModelConfig]
) -> None:
    decoder, arena = sides(shape(qk_norm=True, **more), scales=scales, two_way=True)[1]
    graphs = captured(decoder, arena, 512)
    rng = np.random.default_rng(5)
    free = rng.permutation(np.arange(1, 400)).tolist()
    a, b, c = (sequence(rng, n, free, len(decoder.windows)) for n in (300, 200, 40))
    before = build([Work(c, 0, 39, Kind.PROMPT)]).step
    forward(decoder, arena, replace(before, logits_indices=np.arange(1)))
    for rows in (300, 131):
        work = [
            Work(c, 39, 1, Kind.DECODE),
            Work(a, 0, rows, Kind.PROMPT),
            Work(b, 0, 150, Kind.PROMPT),
        ]
        step = build(work).step
        spans = images((11, 111), (1 + rows, 1 + rows + 64))
        step = replace(
            step,
            layout=replace(step.layout, spans=spans),
            logits_indices=np.arange(len(step.tokens)),
        )
        assert not graphs.whole.fits(step)
        graphs.segments.made.fill_(float("nan"))  # what a larger step left must not matter
        with torch.inference_mode():
            got = graphs.run(step).clone()
        want = forward(decoder, arena, step)
        distance = float((got - want).float().norm() / want.float().norm())
        assert distance < 5e-2, (rows, distance)
