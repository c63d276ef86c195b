"""Time of one layer's attention over a large paged KV cache, by memory layout and kernel, and over
one in fp8: our kernel for decodes, for chunks a copy and fa3, against FlashInfer's fa2.

By page: all layers of a page are contiguous, as in our arena, so that one mapping holds a page. By
layer: the pages of each layer are contiguous, as in most engines. In both, a sequence's pages are
random ones of the whole cache, so that TLB misses count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from record import record, table
from shapes import LLAMA8B

from kvline_server.kernels.attention import Heads, PageTables, SlotMapping
from kvline_server.kernels.fp8 import FP8
from kvline_server.kernels.interface import Kernels
from kvline_server.kernels.layout import GroupLayout, Layout
from kvline_server.memory.arena import KVLayer
from kvline_server.memory.pages import PAGE_SIZE

PAGES = 40_000  # 640,000 tokens: 78 GiB of the larger shape
LAYERS = 4
REPEATS = 10


def milliseconds(action: Callable[[], Any]) -> list[float]:
    """Times by CUDA events, after a warm-up, the shortest first."""
    for _ in range(5):
        action()
    times: list[float] = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        action()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)


def captured(work: Callable[[], None]) -> Callable[[], None]:
    """Its kernels without what launching them takes the host."""
    work()  # kernels are loaded at their first launch, which no capture allows
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def layout(counts: list[int], lengths: list[int], rng: np.random.Generator) -> Layout:
    """Sequences of `counts` rows each, over pages drawn at random."""
    count, length = np.asarray(counts, np.int32), np.asarray(lengths, np.int32)
    held = -(-length // PAGE_SIZE)
    starts = [np.concatenate(([0], np.cumsum(x))).astype(np.int32) for x in (count, held)]
    pages = rng.permutation(PAGES - 1)[: starts[1][-1]].astype(np.int32) + 1
    rows = np.arange(starts[0][-1], dtype=np.int32)
    positions = rows + np.repeat(length - count - starts[0][:-1], count)
    page = pages[np.repeat(starts[1][:-1], count) + positions // PAGE_SIZE]
    return Layout(
        decodes=int((count == 1).sum()),
        row_starts=starts[0],
        positions=positions,
        groups=(
            GroupLayout(
                lengths=length,
                page_starts=starts[1],
                pages=pages,
                slots=page.astype(np.int64) * PAGE_SIZE + positions % PAGE_SIZE,
                cleared=np.zeros(0, np.int64),
            ),
        ),
    )


def caches(shape: Any) -> dict[str, list[KVLayer]]:
    by_page = (PAGES, shape.layers, 2, PAGE_SIZE, shape.kv_heads, shape.head_dim)
    whole = torch.zeros(by_page, dtype=torch.bfloat16, device="cuda")
    flat = whole.view(-1)
    by_layer = flat.view(shape.layers, 2, PAGES, PAGE_SIZE, shape.kv_heads, shape.head_dim)
    return {
        "by page": [KVLayer(whole[:, i, 0], whole[:, i, 1]) for i in range(shape.layers)],
        "by layer": [KVLayer(by_layer[i, 0], by_layer[i, 1]) for i in range(shape.layers)],
    }


CASES = {
    "decode 64 x 512": ([1] * 64, [512] * 64),
    "decode 256 x 512": ([1] * 256, [512] * 256),
    "decode 256 x 2048": ([1] * 256, [2048] * 256),
    "decode 512 x 1024": ([1] * 512, [1024] * 512),
    "prompt 1 x 8192": ([8192], [8192]),
    "prompts 32 x 256": ([256] * 32, [256] * 32),
    "last chunk 2048 of 8192": ([2048], [8192]),
    "last chunk 512 of 8192": ([512], [8192]),
    "last chunk 128 of 8192": ([128], [8192]),
}


def run() -> None:
    from kvline_server.kernels.flashinfer import FlashInferKernels

    kernels = FlashInferKernels(LLAMA8B.heads, LLAMA8B.kv_heads, LLAMA8B.head_dim)
    held = caches(LLAMA8B)
    rng = np.random.default_rng(0)
    rows = [measure(kernels, held, name, layout(*case, rng)) for name, case in CASES.items()]
    head = ["32 layers of llama8b", "by page ms", "by layer ms", "TB/s by page", "plan on host ms"]
    table("Attention with rope and append, scattered pages", head, rows)
    del held
    torch.cuda.empty_cache()
    layers = fp8_layers()
    rows = [over_fp8(layers, name, layout(*case, rng)) for name, case in CASES.items()]
    head = ["a layer of llama8b", "ours us", "fa2 us", "of it", "TB/s of decodes"]
    table("Attention alone over an fp8 KV cache", head, rows)


def fp8_layers() -> list[KVLayer]:
    """By page, of random numbers none of which is a NaN."""
    by_page = (PAGES, LAYERS, 2, PAGE_SIZE, LLAMA8B.kv_heads, LLAMA8B.head_dim)
    whole = torch.empty(by_page, dtype=torch.uint8, device="cuda").random_(0, 120).view(FP8)
    return [KVLayer(whole[:, i, 0], whole[:, i, 1]) for i in range(LAYERS)]


@torch.inference_mode()
def over_fp8(layers: list[KVLayer], name: str, made: Layout) -> list[str]:
    """Layers take turns, so that each one's cache comes from memory."""
    from kvline_server.kernels.flashinfer import FlashInferKernels
    from kvline_server.kernels.flashinfer_attention import FLOAT_BYTES, PagedAttention

    shape = (LLAMA8B.heads, LLAMA8B.kv_heads, LLAMA8B.head_dim)
    kernels = FlashInferKernels(*shape, cache=FP8)
    floats = torch.empty(2 * FLOAT_BYTES, dtype=torch.uint8, device="cuda")
    causal = not made.decodes
    fa2 = PagedAttention(shape, kernels.dtype, FP8, "fa2", causal, 0, floats)
    q = torch.randn((made.rows, *shape[::2]), device="cuda", dtype=kernels.dtype)
    out, scale = torch.empty_like(q), LLAMA8B.head_dim**-0.5
    plan = kernels.attention.plan(made, 0, 0)
    (group,) = made.groups
    last = (group.lengths - 1) % PAGE_SIZE + 1
    arrays = (made.row_starts, group.page_starts, group.pages, last)
    host = (made.row_starts, group.page_starts, group.lengths)
    planned = fa2.plan(PageTables(*host, *kernels.upload(*arrays)))

    def ours() -> None:
        for layer in layers:
            kernels.attention.attend(q, layer, plan)

    def flashinfer_s() -> None:
        for layer in layers:
            fa2.run(q, layer, planned, scale, out)

    each = [milliseconds(captured(work)) for work in (ours, flashinfer_s)]
    took, other = (1e3 * median(times) / LAYERS for times in each)
    spread = (1e3 * each[0][0] / LAYERS, 1e3 * each[0][-1] / LAYERS)
    rate = int(made.groups[0].lengths.sum()) * 2 * LLAMA8B.kv_heads * LLAMA8B.head_dim / took / 1e6
    shown = f"{rate:.2f}" if made.decodes else ""
    gpu = torch.cuda.get_device_name(0)
    record(f"fp8kv-attention-us-{name.replace(' ', '-')}", took, "us", spread, gpu)
    return [name, f"{took:.1f}", f"{other:.1f}", f"{took / other:.3f}", shown]


def measure(kernels: Kernels, held: dict[str, list[KVLayer]], name: str, made: Layout) -> list[str]:
    plan = kernels.attention.plan(made, 0, 0)
    count = LLAMA8B.heads + 2 * LLAMA8B.kv_heads
    heads = torch.randn(made.rows, count, 128, device="cuda", dtype=torch.bfloat16)
    rope = kernels.attention.rope_table(*torch.ones(2, 8192, 64))
    where = SlotMapping(*kernels.upload(made.positions, made.groups[0].slots))
    fused = Heads(heads, LLAMA8B.heads, LLAMA8B.kv_heads, None, None, 1e-5)

    def all_layers(layers: list[KVLayer]) -> None:
        for layer in layers:
            kernels.attention.write(fused, rope, where, layer)
            kernels.attention.attend(heads[:, : LLAMA8B.heads], layer, plan)

    times: dict[str, float] = {}
    for kind, layers in (*held.items(), *held.items()):
        took = median(milliseconds(partial(all_layers, layers)))
        times[kind] = min(times.get(kind, took), took)
    read = int(made.groups[0].lengths.sum()) * 2 * LLAMA8B.kv_heads * 128 * 2 * LLAMA8B.layers
    started = time.perf_counter()
    for _ in range(10):
        kernels.attention.plan(made, 0, 0)
    host = (time.perf_counter() - started) / 10 * 1e3
    figures = [*(times[k] for k in held), read / times["by page"] / 1e9, host]
    return [name, *(f"{figure:.2f}" for figure in figures)]
