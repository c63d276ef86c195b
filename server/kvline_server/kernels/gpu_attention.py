"""Attention on a GPU: FlashInfer's, and our own over an fp8 KV cache.

Decodes run its fa2 kernels on tensor cores, prompt chunks its fa3 kernels: on Hopper fa3 is several
times slower for one-token queries, and faster for chunks. With an fp8 KV cache decodes run our own,
and chunks a copy's fa3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

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


@dataclass(frozen=True, slots=True)
class Runners:
    """What runs the layers of one window."""

    decode: PagedAttention | Fp8Decodes
    prefill: PagedAttention | Fp8Chunks


@dataclass(frozen=True, slots=True)
class Plan:
    decodes: int  # rows of decodes
    rows: int
    runners: Runners
    decode: Any  # of what runs decodes, or None; so is the next
    prefill: Any


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
    ) -> None:
        """`shape` is heads, key-value heads and head size; `cache` is the KV cache's dtype,
        `windows` are those of the layers. Raises RuntimeError or ImportError where kernels are
        missing."""
        self.device = device
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        fp8, few = cache != dtype, cuda_attention.fits(*shape[:2])
        # Without chunks and with few queries a key-value head fa2's blocks have 16 rows.
        size = max(FLOAT_BYTES, chunk_floats(shape, processors) if fp8 or not few else 0)
        floats = torch.empty(size, dtype=torch.uint8, device=device)
        copy = page_copies(shape, dtype, device) if fp8 else None

        def runners(window: int) -> Runners:
            decode: PagedAttention | Fp8Decodes
            if fp8 and few:
                decode = Fp8Decodes(*shape, processors, window)
            else:
                decode = PagedAttention(shape, dtype, cache, "fa2", False, window, floats)
            if copy is not None:
                return Runners(decode, Fp8Chunks(shape, cache, window, floats, copy))
            prefill = PagedAttention(shape, dtype, cache, "fa3", True, window, floats)
            return Runners(decode, prefill)

        self._runners = {window: runners(window) for window in windows}

    def rope_table(self, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """float32 [positions, rotated elements]: all cosines, then all sines"""
        return torch.cat((cos, sin), dim=-1).to(self.device)

    def plan(self, layout: Layout, group: int, window: int) -> Plan:
        assert layout.spans is None, "images whose tokens see each other are refused on GPUs"
        layout = replace(layout, groups=(layout.groups[group],)).apart()
        runners, held = self._runners[window], layout.groups[0]
        last_page = (held.lengths - 1) % PAGE_SIZE + 1
        kinds = slice(0, layout.decodes), slice(layout.decodes, layout.sequences)
        arrays = []
        for own in kinds:
            ends = slice(own.start, own.stop + 1)
            rows, pages = layout.row_starts[ends], held.page_starts[ends]
            used = held.pages[pages[0] : pages[-1]]
            arrays.append((rows - rows[0], pages - pages[0], used, last_page[own]))
        device = upload(self.device, *arrays[0], *arrays[1])
        decode, prefill = (
            PageTables(rows, pages, held.lengths[own], *device[at : at + 4])
            for own, (rows, pages, *_), at in zip(kinds, arrays, (0, 4), strict=True)
        )
        return Plan(
            layout.decodes,
            layout.rows,
            runners,
            runners.decode.plan(decode) if len(decode.lengths) else None,
            runners.prefill.plan(prefill) if len(prefill.lengths) else None,
        )

    def plan_in_place(self, tables: PageTables, window: int) -> Plan:
        rows, runners = len(tables.lengths), self._runners[window]
        return Plan(rows, rows, runners, runners.decode.plan(tables, in_place=True), None)

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
        made = flat.view(rows, heads, dim)
        if plan.decode is not None:
            own = slice(plan.decodes)
            plan.runners.decode.run(q[own], cache, plan.decode, scale, made[own], sinks)
        if plan.prefill is not None:
            own = slice(plan.decodes, plan.rows)
            plan.runners.prefill.run(q[own], cache, plan.prefill, scale, made[own], sinks)
        return flat if cache.scales.values == 1.0 else flat.mul_(cache.scales.values)
