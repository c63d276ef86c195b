"""Attention with and without windows on the GPU, against sums in float64: each head size, over a
cache in bfloat16 and in fp8, eager and in a captured graph."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from float64_attention import expected
from oracle import attention, filled, near, planned, replayed

from kvline_server.kernels.fp8 import FP8
from kvline_server.memory.pages import PAGE_SIZE

pytestmark = pytest.mark.gpu
WINDOWS = (0, 1, 100, 1024)
# Queries, keys and values, size: of Gemma 3's 1B and 12B, and of others.
SHAPES = [(4, 1, 256), (16, 8, 256), (8, 2, 128), (14, 2, 64), (32, 1, 128)]
CACHES = pytest.mark.parametrize("cache", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
# Lengths under, at and over the windows, within a page, at its end and over it.
DECODES = (1, 16, 99, 100, 101, 107, 700, 1023, 1024, 1025, 5000)
CHUNKS = ((0, 40), (16, 90), (0, 101), (90, 20), (1000, 300), (3000, 700))  # start and rows of each
STEPS = (
    (DECODES, ()),
    ((), CHUNKS),
    ((), ((20_000, 16),)),  # few rows of many pages: with an fp8 cache without a copy
    (DECODES, CHUNKS),
)


@CACHES
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_sees_the_last_tokens_up_to_its_window(
    shape: tuple[int, int, int], cache: torch.dtype
) -> None:
    torch.manual_seed(1)
    ours, layer = attention(shape, cache, WINDOWS), filled(shape, cache)
    queries, keys, dim = shape
    for decodes, chunks in STEPS:
        layout = planned(decodes, chunks)
        fused = torch.randn(layout.rows, queries + 2 * keys, dim, device="cuda").bfloat16()
        q, scale = fused[:, :queries], 0.7 * dim**-0.5
        plans = {window: ours.plan(layout, 0, window) for window in WINDOWS}  # as of one step
        for window, plan in plans.items():
            got = ours.attend(q, layer, plan, scale=scale)
            near(got, expected(q, layer, layout, window, scale), (window, decodes, chunks))
            if cache == FP8 and chunks and not decodes:
                (part,) = plan.parts
                assert (part.planned.copied is None) == (len(chunks) == 1)


@CACHES
@pytest.mark.parametrize("shape", SHAPES)
def test_lengths_may_count_from_the_first_page_that_is_kept(
    shape: tuple[int, int, int], cache: torch.dtype
) -> None:
    """What no row's window reaches can be left out of the tables."""
    torch.manual_seed(2)
    ours, layer, window = attention(shape, cache, WINDOWS), filled(shape, cache), 100
    whole = planned(DECODES, CHUNKS)
    (group,) = whole.groups
    rows, held = np.diff(whole.row_starts), np.diff(group.page_starts)
    dropped = np.maximum(0, group.lengths - rows + 1 - window) // PAGE_SIZE
    parts = [
        group.pages[end - count : end]
        for end, count in zip(group.page_starts[1:], held - dropped, strict=True)
    ]
    kept = replace(
        group,
        lengths=(group.lengths - dropped * PAGE_SIZE).astype(np.int32),
        page_starts=np.cumsum([0, *map(len, parts)]).astype(np.int32),
        pages=np.concatenate(parts),
    )
    short = replace(whole, groups=(kept,))
    assert len(kept.pages) < len(group.pages) / 2
    q = torch.randn(whole.rows, shape[0], shape[2], device="cuda").bfloat16()
    want = expected(q, layer, whole, window, shape[2] ** -0.5)
    near(ours.attend(q, layer, ours.plan(short, 0, window)), want, shape)


@CACHES
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [11, 300])
def test_a_captured_plan_attends_to_what_is_planned_again(
    shape: tuple[int, int, int], cache: torch.dtype, rows: int
) -> None:
    """Two windows in one graph, as of two layers; few rows, whose tokens are split, and many."""
    torch.manual_seed(3)
    ours, layer = attention(shape, cache, WINDOWS), filled(shape, cache)
    q = torch.randn(rows, shape[0], shape[2], device="cuda").bfloat16()
    lengths = [DECODES[at % len(DECODES)] for at in range(rows)] if rows < 100 else [1, 90] * 150
    for layout, outs in replayed(ours, layer, q, WINDOWS, (lengths, lengths[::-1])):
        for window, out in zip(WINDOWS, outs, strict=True):
            near(out, expected(q, layer, layout, window, shape[2] ** -0.5), (window, rows))
