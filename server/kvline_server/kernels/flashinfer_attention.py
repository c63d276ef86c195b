"""FlashInfer's paged attention, planned without the host cost of its Python wrappers.

The wrappers visit every sequence in Python for each plan; the modules below them do not. A step has
a plan for each window, so each window has objects of its own here. Staging buffers take turns, one
more than there are steps in flight: a plan is copied from pinned memory
asynchronously, behind the step before, so its buffer must not be rewritten until that step is
complete (otherwise: illegal memory accesses). Source: flashinfer.prefill, version 0.6.18.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from flashinfer.prefill import get_batch_prefill_module
from flashinfer.utils import MaskMode, PosEncodingMode, TensorLayout

from kvline_server.kernels import cuda_sinks
from kvline_server.kernels.attention import PageTables
from kvline_server.kernels.cuda_attention import copy_pages, is_copied
from kvline_server.memory.arena import KVLayer
from kvline_server.memory.pages import PAGE_SIZE

FLOAT_BYTES = 128 << 20
# Of a plan: fa2 needs 8 for each row and 13 for each block, which has 16 rows or more of a chunk's
# queries; fa3 28 for each 128 rows of each head, or of all where sequences and rows are very many.
INT_BYTES = {"fa2": 2 << 20, "fa3": 8 << 20}
# Of one layer's keys and values, for chunks over an fp8 cache, at most; a step of no more rows than
# that many pages needs no more of them.
COPY_BYTES, COPY_PAGES = 128 << 20, 8192
DEPTH = 1  # steps in flight while the host prepares the next one
# Rows of a chunk in a block of fa2, those of a key-value head's queries together, by head size.
TILE = {64: 128, 128: 128, 256: 64}


def chunk_floats(shape: tuple[int, int, int], processors: int) -> int:
    """Bytes of workspace that fa2 takes at most for prompt chunks, as its plan counts them: where
    it splits their tokens it keeps outputs and sums of two blocks a processor. FLOAT_BYTES are too
    few for eight queries a key-value head."""
    heads, kv_heads, dim = shape
    blocks = max(1, 2 * processors // kv_heads)
    return heads * blocks * TILE[dim] * (dim + 1) * 4 + 256  # 256: what aligns the parts


@dataclass(frozen=True, slots=True)
class Planned:
    info: Any
    ints: torch.Tensor
    table: PageTables


class PagedAttention:
    """One FlashInfer backend: fa2 for decodes, which are not causal, fa3 for prompt chunks. fa3
    reads an fp8 KV cache only with fp8 queries, fa2 with any. What the cache is multiplied by is no
    argument of fa2: the keys' scale is in that of query times key, the values' in what is done with
    `out`. For windows there are modules of their own, which count the tokens left of a query. fa3's
    ends with a block of values whose weights are 0, and reads that of the first pages for it: they
    must be the sequence's own."""

    def __init__(
        self,
        shape: tuple[int, int, int],  # heads, key-value heads, head size
        dtype: torch.dtype,
        cache: torch.dtype,
        backend: str,
        causal: bool,  # else rows see all of their sequence's tokens, or from their window on
        window: int,
        floats: torch.Tensor,
    ) -> None:
        """`floats` is workspace that all attention calls of one stream share."""
        self._shape = shape
        dim = shape[2]
        none = PosEncodingMode["NONE"].value
        kinds = (dtype, cache, dtype, torch.int32)
        self._left = window - 1  # -1: no window
        self._module = get_batch_prefill_module(
            backend, *kinds, dim, dim, none, window > 0, False, False
        )
        processors = torch.cuda.get_device_properties(floats.device).multi_processor_count
        self._blocks = 2 * processors  # that run at once, as FlashInfer's plan counts them
        self._causal, self._splits = causal, backend == "fa2"
        self._floats = floats
        self._stagings = [
            (
                torch.empty(INT_BYTES[backend], dtype=torch.uint8, device=floats.device),
                torch.empty(INT_BYTES[backend], dtype=torch.uint8, pin_memory=True),
            )
            for _ in range(DEPTH + 1)
        ]
        self._turn = 0

    def plan(self, table: PageTables, in_place: bool = False) -> Planned:
        """`in_place` is for a captured graph: the workspace has one address, and the kernels' grid
        depends on the number of rows alone."""
        self._turn = (self._turn + 1) % len(self._stagings)
        ints, pinned = self._stagings[self._turn]
        if in_place:  # copies to it are queued behind the graph that reads it
            ints = self._stagings[0][0]
        heads, kv_heads, dim = self._shape
        rows = len(table.lengths)
        # A sequence's tokens are split among blocks only where the rows leave some idle. A graph is
        # captured with or without, which must not depend on the lengths there. Each sequence has
        # one row in it, or the grid would have blocks for which no sequence is planned.
        whole = in_place and rows * kv_heads > self._blocks
        # With a window fa2 splits what causal rows of a block see, and drops what is behind them.
        whole |= not self._causal and self._left >= 0 and int(table.row_starts[-1]) > rows
        extra = (-1, whole, 0, int(in_place)) if self._splits else ()
        info = self._module.plan(
            self._floats,
            ints,
            pinned,
            torch.from_numpy(table.row_starts),
            torch.from_numpy(table.page_starts),
            torch.from_numpy(table.lengths),
            int(table.row_starts[-1]),
            rows,
            heads,
            kv_heads,
            PAGE_SIZE,
            in_place,
            dim,
            dim,
            self._causal,
            self._left,
            *extra,
        )
        return Planned(info, ints, table)

    def run(
        self,
        q: torch.Tensor,
        cache: KVLayer,
        planned: Planned,
        scale: float,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """`scale` is that of query times key. q [rows, heads, dim], possibly strided -> out of the
        same shape, contiguous; sinks float32 [heads]"""
        log_sums = None  # to base 2, of all of a row's tokens also where a plan splits them
        if sinks is not None:
            log_sums = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        table = planned.table
        mask = MaskMode.CAUSAL if self._causal else MaskMode.NON_CAUSAL
        self._module.paged_run(
            self._floats,
            planned.ints,
            planned.info,
            q,
            cache.keys,
            cache.values,
            table.device_row_starts,
            table.device_page_starts,
            table.pages,
            table.last_page,
            out,
            log_sums,
            mask.value,
            TensorLayout["NHD"].value,
            self._left,
            True,  # programmatic dependent launch
            *[None] * 6,  # masks, slopes, items
            0.0,  # no soft cap
            scale,
            *[None] * 3,  # scales, of fp8 queries alone
            1.0,
            1e4,
            0,
            FLOAT_BYTES,
        )
        if sinks is not None and log_sums is not None:
            cuda_sinks.apply(out, log_sums, sinks)


@dataclass(frozen=True, slots=True)
class Chunks:
    planned: Planned
    copied: torch.Tensor | None  # the pages, in the order of their copies


def page_copies(shape: tuple[int, int, int], dtype: torch.dtype, device: Any) -> torch.Tensor:
    """Room for keys and values of one layer's pages. [2, pages, page, kv_heads, dim]"""
    page = (PAGE_SIZE, *shape[1:])
    pages = min(COPY_PAGES, COPY_BYTES // (2 * dtype.itemsize * math.prod(page)))
    return torch.empty((2, pages, *page), dtype=dtype, device=device)


class Fp8Chunks:
    """Prompt chunks over an fp8 KV cache: by fa3 over a copy of their sequences' pages in bfloat16,
    made anew for each layer; by fa2, which reads fp8 itself, where the copy has no room for them or
    would take longer than the chunks."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        cache: torch.dtype,
        causal: bool,
        window: int,
        floats: torch.Tensor,
        copy: torch.Tensor,
    ) -> None:
        """As PagedAttention; `copy` is page_copies, which all share."""
        dtype = copy.dtype
        self._direct = PagedAttention(shape, dtype, cache, "fa2", causal, window, floats)
        self._copied = PagedAttention(shape, dtype, dtype, "fa3", causal, window, floats)
        self._copy = copy
        self._layer = KVLayer(*copy)
        self._places = torch.arange(copy.shape[1], dtype=torch.int32, device=floats.device)

    def plan(self, table: PageTables) -> Chunks:
        rows, pages = int(table.row_starts[-1]), int(table.page_starts[-1])
        if not is_copied(rows, pages, len(self._places)):
            return Chunks(self._direct.plan(table), None)
        return Chunks(self._copied.plan(replace(table, pages=self._places)), table.pages)

    def run(
        self,
        q: torch.Tensor,
        cache: KVLayer,
        chunks: Chunks,
        scale: float,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if chunks.copied is None:
            return self._direct.run(q, cache, chunks.planned, scale, out, sinks)
        copy_pages(cache, chunks.copied, self._copy)
        self._copied.run(q, self._layer, chunks.planned, scale, out, sinks)
