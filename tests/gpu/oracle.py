"""What the kernels of attention are given in their tests, and how far they are from float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from pairs import sequence

from kvline_server.engine.batch import build
from kvline_server.engine.work import Kind, Work
from kvline_server.kernels.attention import PageTables
from kvline_server.kernels.fp8 import FP8
from kvline_server.kernels.layout import Layout
from kvline_server.memory.arena import KVLayer, KVShape, Scales
from kvline_server.memory.pages import PAGE_SIZE

PAGES = 2000
SCALES = Scales(0.02, 0.03)


def attention(
    shape: tuple[int, int, int],
    cache: torch.dtype,
    windows: tuple[int, ...],
    two_way: bool = False,
) -> Any:
    from kvline_server.kernels.flashinfer import FlashInferKernels

    return FlashInferKernels(*shape, cache=cache, windows=windows, two_way=two_way).attention


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


def near(got: torch.Tensor, want: torch.Tensor, what: Any) -> None:
    """Each row: one that is wrong must not be lost among many."""
    got = got.view_as(want).double()
    distance = (got - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)
    assert got.isfinite().all() and float(distance.max()) < 2e-2, (what, distance.max())


def replayed(
    ours: Any,
    layer: KVLayer,
    q: torch.Tensor,
    windows: tuple[int, ...],
    steps: Sequence[Sequence[int]],
    sinks: torch.Tensor | None = None,
) -> Iterator[tuple[Layout, list[torch.Tensor]]]:
    """Captures decodes of a token each, with an attention for each window, and plans and replays
    that for steps of so many tokens each. -> their layouts, and what each window's is"""
    rows, heads, dim = q.shape
    pages = torch.zeros(PAGES, dtype=torch.int32, device="cuda")
    ends = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
    starts, last = ends.clone(), torch.ones(rows, dtype=torch.int32, device="cuda")
    outs = [torch.zeros(rows, heads * dim, device="cuda").bfloat16() for _ in windows]

    def plans(layout: Layout) -> list[Any]:
        (held,) = layout.groups
        host = layout.row_starts, held.page_starts, held.lengths
        tables = PageTables(*host, ends, starts, pages, last)
        return [ours.plan_in_place(tables, window) for window in windows]

    def run(made: list[Any]) -> None:
        for plan, out in zip(made, outs, strict=True):
            ours.attend(q, layer, plan, out, sinks=sinks)

    made = plans(planned((1,) * rows, ()))
    run(made)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(made)
    for lengths in steps:
        layout = planned(tuple(lengths), ())
        (held,) = layout.groups
        pages[: len(held.pages)].copy_(torch.from_numpy(held.pages))
        starts.copy_(torch.from_numpy(held.page_starts))
        last.copy_(torch.from_numpy(((held.lengths - 1) % PAGE_SIZE + 1).astype(np.int32)))
        plans(layout)
        graph.replay()
        yield layout, outs
