"""Attention on a GPU: FlashInfer's, and our own over an fp8 KV cache.

Decodes run its fa2 kernels on tensor cores, prompt chunks its fa3 kernels: on Hopper fa3 is several
times slower for one-token queries, and faster for chunks. With an fp8 KV cache decodes run our own,
and chunks a copy's fa3. Tokens of an image that see each other run the chunks' kernels without the
causal mask, in a plan of their own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvline_server.kernels import cuda_attention, cuda_write
from kvline_server.kernels.attention import (
    SHORT_CHUNKS,
    Attention,
    Heads,
    PageTables,
    SlotMapping,
)
from kvline_server.kernels.cuda_attention import Fp8Decodes
from kvline_server.kernels.flashinfer_attention import (
    FLOAT_BYTES,
    Fp8Chunks,
    PagedAttention,
    chunk_floats,
    page_copies,
)
from kvline_server.kernels.layout import Layout
from kvline_server.kernels.pinned import upload
from kvline_server.memory.arena import KVLayer
from kvline_server.memory.pages import PAGE_SIZE

Runner = PagedAttention | Fp8Decodes | Fp8Chunks


@dataclass(frozen=True, slots=True)
class Runners:
    """What runs the layers of one window."""

    decode: PagedAttention | Fp8Decodes
    prefill: Runner
    spans: Runner | None  # without the causal mask


@dataclass(frozen=True, slots=True)
class Part:
    rows: slice
    runner: Runner
    planned: Any  # by the runner


@dataclass(frozen=True, slots=True)
class Plan:
    parts: tuple[Part, ...]
    moved: torch.Tensor | None = None  # int64: of the step, which these rows are; None: its own


class GpuAttention(Attention):
    tiles_context = True
    short_chunks = SHORT_CHUNKS

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        shape: tuple[int, int, int],
        cache: torch.dtype,
        windows: tuple[int, ...],
        two_way: bool = False,
    ) -> None:
        """`shape` is heads, key-value heads and head size; `cache` is the KV cache's dtype,
        `windows` are those of the layers. `two_way`: layouts may have spans, whose workspaces are
        there from the start. Raises RuntimeError or ImportError where kernels are missing."""
        self.device = device
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        fp8, few = cache != dtype, cuda_attention.fits(*shape[:2])
        # Without chunks and with few queries a key-value head fa2's blocks have 16 rows.
        size = max(FLOAT_BYTES, chunk_floats(shape, processors) if fp8 or not few else 0)
        floats = torch.empty(size, dtype=torch.uint8, device=device)
        copy = page_copies(shape, dtype, device) if fp8 else None

        def chunks(window: int, causal: bool) -> PagedAttention | Fp8Chunks:
            if copy is not None:
                return Fp8Chunks(shape, cache, causal, window, floats, copy)
            return PagedAttention(shape, dtype, cache, "fa3", causal, window, floats)

        def runners(window: int) -> Runners:
            decode: PagedAttention | Fp8Decodes
            if fp8 and few:
                decode = Fp8Decodes(*shape, processors, window)
            else:
                decode = PagedAttention(shape, dtype, cache, "fa2", False, window, floats)
            spans = chunks(window, causal=False) if two_way else None
            return Runners(decode, chunks(window, causal=True), spans)

        self._runners = {window: runners(window) for window in windows}

    def rope_table(self, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """float32 [positions, rotated elements]: all cosines, then all sines"""
        return torch.cat((cos, sin), dim=-1).to(self.device)

    def plan(self, layout: Layout, group: int, window: int) -> Plan:
        layout = replace(layout, groups=(layout.groups[group],)).apart()
        runners, causal, moved = self._runners[window], layout.sequences, list[np.ndarray]()
        if layout.spans is not None:
            layout, causal, rows = layout.by_kind()
            moved.append(rows)
        kinds: list[tuple[slice, Runner | None]] = [
            (slice(0, layout.decodes), runners.decode),
            (slice(layout.decodes, causal), runners.prefill),
            (slice(causal, layout.sequences), runners.spans),
        ]
        kinds = [each for each in kinds if each[0].start < each[0].stop]
        arrays = [_arrays(layout, own) for own, _ in kinds]
        device = iter(upload(self.device, *chain(*arrays), *moved))
        parts = []
        for (own, runner), host in zip(kinds, arrays, strict=True):
            lengths = layout.groups[0].lengths[own]
            table = PageTables(host[0], host[1], lengths, *islice(device, 4))
            assert runner is not None, "these kernels are of a model without spans"
            of = slice(*layout.row_starts[[own.start, own.stop]].tolist())
            parts.append(Part(of, runner, runner.plan(table)))
        return Plan(tuple(parts), next(device, None))

    def plan_in_place(self, tables: PageTables, window: int) -> Plan:
        rows, runner = slice(len(tables.lengths)), self._runners[window].decode
        return Plan((Part(rows, runner, runner.plan(tables, in_place=True)),))

    def write(
        self, heads: Heads, rope: torch.Tensor | None, mapping: SlotMapping, cache: KVLayer
    ) -> None:
        cuda_write.write(heads, rope, mapping, cache)

    def attend(
        self,
        q: torch.Tensor,
        cache: KVLayer,
        plan: Plan,
        out: torch.Tensor | None = None,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows, heads, dim = q.shape
        scale = (scale or 1.0 / math.sqrt(dim)) * cache.scales.keys
        flat = q.new_empty((rows, heads * dim)) if out is None else out
        made = into = flat.view(rows, heads, dim)
        if plan.moved is not None:
            q, into = q[plan.moved], torch.empty_like(made)
        for part in plan.parts:
            own = part.rows
            part.runner.run(q[own], cache, part.planned, scale, into[own], sinks)
        if plan.moved is not None:
            made[plan.moved] = into
        return flat if cache.scales.values == 1.0 else flat.mul_(cache.scales.values)


def _arrays(layout: Layout, own: slice) -> tuple[NDArray[np.int32], ...]:
    """Of these sequences, of the only group: row starts, page starts, pages, and how many tokens
    are in each one's last page."""
    held, ends = layout.groups[0], slice(own.start, own.stop + 1)
    rows, pages = layout.row_starts[ends], held.page_starts[ends]
    used, last_page = held.pages[pages[0] : pages[-1]], (held.lengths[own] - 1) % PAGE_SIZE + 1
    return rows - rows[0], pages - pages[0], used, last_page
