"""Sinks of attention on the GPU, against a softmax in float64 with a logit more: each kind of
kernels, over a cache in bfloat16 and in fp8, eager and in captured graphs; a model with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from float64_attention import expected
from oracle import attention, filled, near, planned, replayed
from pairs import captured, forward, hidden, sequence, sides, slide

from kvline_server.engine.batch import build
from kvline_server.engine.work import Kind, Work
from kvline_server.kernels.fp8 import FP8
from kvline_server.memory.arena import Scales
from kvline_server.model.attention import Attention
from kvline_server.model.config import ModelConfig
from kvline_server.model.decoder import Decoder

pytestmark = pytest.mark.gpu
WINDOWS = (0, 128)
# Queries, keys and values, size: gpt-oss on one, two and eight ranks; the last decodes by fa2 over
# an fp8 cache too.
SHAPES = [(64, 8, 64), (32, 4, 64), (8, 1, 64), (16, 8, 256), (32, 1, 128)]
CACHES = pytest.mark.parametrize("cache", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
# Lengths under, at and over the window, and of which a plan splits the tokens.
DECODES = (1, 16, 127, 128, 129, 135, 700, 5000)
CHUNKS = ((0, 40), (100, 50), (0, 129), (1000, 300))  # start and rows of each
STEPS = ((DECODES, ()), ((9000,), ()), ((), CHUNKS), ((), ((20_000, 16),)), (DECODES, CHUNKS))


def far(heads: int) -> torch.Tensor:
    """From far below other logits to far above them: some heads have next to nothing left."""
    return torch.linspace(-20, 20, heads, device="cuda")[torch.randperm(heads, device="cuda")]


def near_by_head(got: torch.Tensor, want: torch.Tensor, what: object) -> None:
    """Each row and head: those that have much of the softmax would hide the others."""
    near(got.reshape(-1, want.shape[-1]), want.flatten(0, 1), what)


@CACHES
@pytest.mark.parametrize("shape", SHAPES)
def test_a_sink_has_a_share_of_the_softmax_and_no_value(
    shape: tuple[int, int, int], cache: torch.dtype
) -> None:
    torch.manual_seed(1)
    ours, layer, sinks = attention(shape, cache, WINDOWS), filled(shape, cache), far(shape[0])
    queries, keys, dim = shape
    for decodes, chunks in STEPS:
        layout = planned(decodes, chunks)
        fused = torch.randn(layout.rows, queries + 2 * keys, dim, device="cuda").bfloat16()
        q, scale = fused[:, :queries], 0.7 * dim**-0.5
        for window in WINDOWS:
            plan = ours.plan(layout, 0, window)
            plain = ours.attend(q, layer, plan, scale=scale)
            got = ours.attend(q, layer, plan, scale=scale, sinks=sinks)
            want = expected(q, layer, layout, window, scale, sinks)
            near_by_head(got, want, (window, decodes, chunks))
            none = ours.attend(q, layer, plan, scale=scale, sinks=torch.full_like(sinks, -1e4))
            assert torch.equal(none, plain)


@CACHES
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [8, 300])
def test_captured_attention_has_them_whatever_is_planned(
    shape: tuple[int, int, int], cache: torch.dtype, rows: int
) -> None:
    """Few rows, whose tokens are split, and many."""
    torch.manual_seed(2)
    ours, layer, sinks = attention(shape, cache, WINDOWS), filled(shape, cache), far(shape[0])
    q = torch.randn(rows, shape[0], shape[2], device="cuda").bfloat16()
    lengths = list(DECODES) if rows == len(DECODES) else [1, 90, 130] * 100
    steps = lengths, lengths[::-1], [1] * rows
    for layout, outs in replayed(ours, layer, q, WINDOWS, steps, sinks):
        for window, out in zip(WINDOWS, outs, strict=True):
            want = expected(q, layer, layout, window, shape[2] ** -0.5, sinks)
            near_by_head(out, want, (window, rows))


@CACHES
def test_a_nan_stays_with_its_sequence(cache: torch.dtype) -> None:
    """And stays one: a row that is not finite ends its request."""
    shape = (64, 8, 64)
    ours, layer, sinks = attention(shape, cache, (0,)), filled(shape, cache), far(64)
    for decodes, chunks in (((5, 700, 40), ()), ((), ((0, 40), (16, 90)))):
        layout = planned(decodes, chunks)
        (held,) = layout.groups
        layer.keys[int(held.pages[-1]), 0] = float("nan")
        q = torch.randn(layout.rows, 64, 64, device="cuda").bfloat16()
        made = ours.attend(q, layer, ours.plan(layout, 0, 0), sinks=sinks)
        sound = int(layout.row_starts[-2])
        assert made[:sound].isfinite().all() and made[-1].isnan().all()
        layer.keys[int(held.pages[-1]), 0] = 0.0


def model(shape: Callable[..., ModelConfig]) -> ModelConfig:
    heads = {"heads": 64, "kv_heads": 8, "head_dim": 64}
    return shape(**heads, windows=(128, 0, 128), sinks=True)


def sink(decoder: Decoder) -> None:
    """The same on both sides, in place, as in graphs that are captured."""
    for index, layer in enumerate(decoder.weights.layers):
        assert isinstance(layer.mixer, Attention) and layer.mixer.sinks is not None
        layer.mixer.sinks.copy_(torch.linspace(-4, 4, 64).roll(7 * index))


@pytest.mark.parametrize(("scales", "most"), [((), 2e-2), ((Scales(0.02, 0.02),) * 3, 5e-2)])
def test_a_model_with_sinks_is_near_the_reference(
    shape: Callable[..., ModelConfig], scales: tuple[Scales, ...], most: float
) -> None:
    """Bounds are those of models without sinks (test_kernels.py, test_kv_cache.py)."""
    both = sides(model(shape), scales=scales)
    for decoder, _ in both:
        sink(decoder)
    rng = np.random.default_rng(3)
    free = rng.permutation(np.arange(1, 400)).tolist()
    a, b = (sequence(rng, n, free, 2) for n in (37, 500))
    for work in (
        [Work(a, 0, 36, Kind.PROMPT), Work(b, 0, 300, Kind.PROMPT)],
        [Work(a, 36, 1, Kind.DECODE), Work(b, 300, 199, Kind.PROMPT)],
        [Work(s, len(s.tokens) - 1, 1, Kind.DECODE) for s in (a, b)],
    ):
        want, got = (hidden(side, work) for side in both)
        assert float((got - want).norm() / want.norm()) < most


@pytest.mark.parametrize("scales", [(), (Scales(0.02, 0.03),) * 3], ids=["bf16", "fp8-cache"])
def test_graphs_give_what_eager_steps_give(
    shape: Callable[..., ModelConfig], scales: tuple[Scales, ...]
) -> None:
    """Whole steps of decodes, whose padding rows have sinks too, and segments."""
    decoder, arena = sides(model(shape), scales=scales)[1]
    sink(decoder)
    graphs = captured(decoder, arena, 64, torch.zeros(40, dtype=torch.int64, device="cuda"))
    rng = np.random.default_rng(5)
    for number in (1, 3, 33):
        free = rng.permutation(np.arange(1, 400)).tolist()
        members = [sequence(rng, int(n), free, 2) for n in rng.integers(2, 180, number)]
        for member in members:
            before = build([Work(member, 0, len(member.tokens) - 1, Kind.PROMPT)]).step
            every = np.arange(len(before.tokens))
            forward(decoder, arena, replace(before, logits_indices=every))
            slide(member, decoder, len(member.tokens) - 1)
        decodes = [Work(s, len(s.tokens) - 1, 1, Kind.DECODE) for s in members]
        chunk = [Work(sequence(rng, 20, free, 2), 0, 20, Kind.PROMPT)]
        for work, whole in ((decodes, True), (decodes + chunk, False)):
            step = build(work).step
            assert graphs.whole.fits(step) == whole
            with torch.inference_mode():
                got = graphs.run(step).clone()
            want = forward(decoder, arena, step)
            distance = float((got - want).float().norm() / want.float().norm())
            assert distance < 2e-2, (number, whole, distance)
