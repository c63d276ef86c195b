"""Attention with and without windows on the GPU, against sums in float64: each head size, over a
cache in bfloat16 and in fp8, eager and in a captured graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pairs import sequence

from kvline_server.engine.batch import build
from kvline_server.engine.scheduler import Kind, Work
from kvline_server.kernels.attention import PageTables
from kvline_server.kernels.fp8 import FP8
from kvline_server.kernels.layout import Layout
from kvline_server.memory.arena import KVLayer, KVShape, Scales
from kvline_server.memory.pages import PAGE_SIZE

pytestmark = pytest.mark.gpu
PAGES = 2000
SCALES = Scales(0.02, 0.03)
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


def attention(shape: tuple[int, int, int], cache: torch.dtype) -> Any:
    from kvline_server.kernels.flashinfer import FlashInferKernels

    return FlashInferKernels(*shape, cache=cache, windows=WINDOWS).attention


def filled(shape: tuple[int, int, int], cache: torch.dtype) -> KVLayer:
    """One of two layers of an arena, so that pages are no neighbours."""
    from kvline_server.memory.cuda import CudaArena

    scales = (Scales(), SCALES) if cache == FP8 else ()
    arena = CudaArena(KVShape(2, *shape[1:], cache, scales), PAGES)
    arena.resize(PAGES)
    layer = arena.layers()[1]
    for part, scale in ((layer.keys, layer.scales.keys), (layer.values, layer.scales.values)):
        part.copy_((torch.randn(part.shape, device="cuda") / scale).clamp_(-448, 448).to(cache))
    return layer


def planned(decodes: tuple[int, ...], chunks: tuple[tuple[int, int], ...]) -> Layout:
    rng = np.random.default_rng(0)
    free = rng.permutation(np.arange(1, PAGES)).tolist()
    work = [Work(sequence(rng, n, free), n - 1, 1, Kind.DECODE) for n in decodes]
    work += [Work(sequence(rng, start + n, free), start, n, Kind.PROMPT) for start, n in chunks]
    return build(work).step.layout


def expected(
    q: torch.Tensor, cache: KVLayer, layout: Layout, window: int, scale: float
) -> torch.Tensor:
    """float64 [rows, heads, dim]"""
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    (held,) = layout.groups
    for at, length in enumerate(held.lengths.tolist()):
        rows = slice(*layout.row_starts[at : at + 2].tolist())
        own = torch.from_numpy(held.pages[slice(*held.page_starts[at : at + 2])]).cuda()
        keys, values = (
            part[own.long()].double().flatten(0, 1)[:length] * by
            for part, by in ((cache.keys, cache.scales.keys), (cache.values, cache.scales.values))
        )
        group = q.shape[1] // keys.shape[1]
        scores = torch.einsum("rhd,nhd->hrn", q[rows].double(), keys.repeat_interleave(group, 1))
        token = torch.arange(length, device=q.device)
        query = token[rows.start - rows.stop :].unsqueeze(1)
        hidden = token > query
        if window:
            hidden |= token <= query - window
        shares = (scores * scale).masked_fill_(hidden, float("-inf")).softmax(dim=-1)
        out[rows] = torch.einsum("hrn,nhd->rhd", shares, values.repeat_interleave(group, 1))
    return out


def near(got: torch.Tensor, want: torch.Tensor, what: Any) -> None:
    """Each row: one that is wrong must not be lost among many."""
    got = got.view_as(want).double()
    distance = (got - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)
    assert got.isfinite().all() and float(distance.max()) < 2e-2, (what, distance.max())


@CACHES
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_sees_the_last_tokens_up_to_its_window(
    shape: tuple[int, int, int], cache: torch.dtype
) -> None:
    torch.manual_seed(1)
    ours, layer = attention(shape, cache), filled(shape, cache)
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
                assert (plan.prefill.copied is None) == (len(chunks) == 1)


@CACHES
@pytest.mark.parametrize("shape", SHAPES)
def test_lengths_may_count_from_the_first_page_that_is_kept(
    shape: tuple[int, int, int], cache: torch.dtype
) -> None:
    """What no row's window reaches can be left out of the tables."""
    torch.manual_seed(2)
    ours, layer, window = attention(shape, cache), filled(shape, cache), 100
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
    ours, layer = attention(shape, cache), filled(shape, cache)
    queries, _, dim = shape
    pages = torch.zeros(PAGES, dtype=torch.int32, device="cuda")
    ends = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
    starts, last = ends.clone(), torch.ones(rows, dtype=torch.int32, device="cuda")
    q = torch.randn(rows, queries, dim, device="cuda").bfloat16()
    outs = [torch.zeros(rows, queries * dim, device="cuda").bfloat16() for _ in WINDOWS]

    def plans(layout: Layout) -> list[Any]:
        (held,) = layout.groups
        host = layout.row_starts, held.page_starts, held.lengths
        tables = PageTables(*host, ends, starts, pages, last)
        return [ours.plan_in_place(tables, window) for window in WINDOWS]

    def run(made: list[Any]) -> None:
        for plan, out in zip(made, outs, strict=True):
            ours.attend(q, layer, plan, out)

    first = planned((1,) * rows, ())
    made = plans(first)
    run(made)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(made)
    lengths = [DECODES[at % len(DECODES)] for at in range(rows)] if rows < 100 else [1, 90] * 150
    for again in (lengths, lengths[::-1]):
        layout = planned(tuple(again), ())
        (held,) = layout.groups
        pages[: len(held.pages)].copy_(torch.from_numpy(held.pages))
        starts.copy_(torch.from_numpy(held.page_starts))
        last.copy_(torch.from_numpy(((held.lengths - 1) % PAGE_SIZE + 1).astype(np.int32)))
        plans(layout)
        graph.replay()
        for window, out in zip(WINDOWS, outs, strict=True):
            near(out, expected(q, layer, layout, window, dim**-0.5), (window, again[:3]))
