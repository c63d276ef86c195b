"""Attention in float64, the oracle of the kernels' tests, and what they compare with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from pairs import sequence

from kvline_server.engine.batch import build
from kvline_server.engine.scheduler import Kind, Work
from kvline_server.kernels.attention import PageTables
from kvline_server.kernels.fp8 import FP8
from kvline_server.kernels.layout import Layout
from kvline_server.memory.arena import KVLayer, KVShape, Scales
from kvline_server.memory.pages import PAGE_SIZE

PAGES = 2000
SCALES = Scales(0.02, 0.03)


def attention(shape: tuple[int, int, int], cache: torch.dtype, windows: tuple[int, ...]) -> Any:
    from kvline_server.kernels.flashinfer import FlashInferKernels

    return FlashInferKernels(*shape, cache=cache, windows=windows).attention


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
    q: torch.Tensor,
    cache: KVLayer,
    layout: Layout,
    window: int,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """float64 [rows, heads, dim]; sinks are a logit more, which is dropped behind the softmax."""
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    (held,) = layout.groups
    for at, length in enumerate(held.lengths.tolist()):
        rows = slice(*layout.row_starts[at : at + 2].tolist())
        own = torch.from_numpy(held.pages[slice(*held.page_starts[at : at + 2])]).to(q.device)
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
        scores = (scores * scale).masked_fill_(hidden, float("-inf"))
        if sinks is not None:
            more = sinks.double().view(-1, 1, 1).expand(-1, len(query), 1)
            scores = torch.cat((scores, more), dim=-1)
        shares = scores.softmax(dim=-1)[..., :length]
        out[rows] = torch.einsum("hrn,nhd->rhd", shares, values.repeat_interleave(group, 1))
    return out


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
