"""Attention over an fp8 KV cache by our Triton kernels: decodes, planned and run as FlashInfer's
(flashinfer_attention.py), whose fa2 reads such a cache at 0.6 to 0.8 of their rate, and the
copies in bfloat16 that prompt chunks read (docs/decisions/035).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvline_server.kernels.attention import PageTables
from kvline_server.kernels.cubins import TRITON_TYPES, Variant, launch
from kvline_server.kernels.cuda_write import DIMS
from kvline_server.kernels.fp8 import FP8
from kvline_server.memory.arena import KVLayer
from kvline_server.memory.pages import PAGE_SIZE

GROUP = 16  # queries of a key-value head, padded
WARPS, STAGES = 4, 6  # of a program
TOKENS = {64: 128, 128: 128, 256: 64}  # of an iteration, by head size
PROGRAMS = 4  # a processor, at least, where splitting gives as many; three run at once
SPLITS = 32  # at most
COPIED = 2048  # keys, and values, of a program


@dataclass(frozen=True, slots=True)
class Fp8Decodes:
    """Of a layer with these heads."""

    queries: int
    keys: int
    dim: int
    processors: int
    window: int = 0  # tokens that a query sees, itself included; 0: all

    def plan(self, table: PageTables, in_place: bool = False) -> PageTables:
        """Nothing depends on lengths that the host knows: all of it can be captured."""
        return table

    def splits(self, rows: int) -> int:
        """Parts of a sequence's tokens, as in split-KV decoding; of a window no more than those of
        its pages fill."""
        most = -(-(self.window + PAGE_SIZE) // TOKENS[self.dim]) if self.window else SPLITS
        return min(SPLITS, most, -(-PROGRAMS * self.processors // (rows * self.keys)))

    def run(
        self,
        q: torch.Tensor,
        cache: KVLayer,
        table: PageTables,
        scale: float,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """As PagedAttention.run, of sequences with one row each."""
        rows, splits = len(q), self.splits(len(q))
        parts = max_and_sum = out
        if splits > 1:
            shape = (rows, splits, self.queries)
            parts = torch.empty((*shape, self.dim), dtype=torch.float32, device=out.device)
            max_and_sum = torch.empty((*shape, 2), dtype=torch.float32, device=out.device)
        keys, values = (part.view(torch.int16) for part in (cache.keys, cache.values))
        arrays = (table.device_page_starts, table.pages, table.last_page)
        sizes = (self.queries, self.keys, self.window, splits)
        kind = out.dtype, self.dim
        variant = _variant(*kind, splits > 1, self.window > 0, splits == 1 and sinks is not None)
        programs = rows * self.keys * splits
        cached, made = (keys, values, keys.stride(0)), (parts, max_and_sum)
        log2_scale = scale * math.log2(math.e)
        given = out if sinks is None else sinks  # of which kernels without sinks read nothing
        launch(
            variant, programs, q, q.stride(0), *cached, *arrays, log2_scale, *made, given, *sizes
        )
        if splits > 1:
            merge = _merge_variant(*kind, sinks is not None)
            launch(merge, rows * self.queries, *made, out, given, self.queries, splits)


def fits(queries: int, keys: int) -> bool:
    return queries <= GROUP * keys


def is_copied(rows: int, pages: int, room: int) -> bool:
    """Whether chunks of so many rows read a copy of their sequences' pages. For 512 rows of 512
    pages a copy takes half of fa2's time; fewer rows than pages were not tried."""
    return pages <= min(rows, room)


def copy_pages(cache: KVLayer, pages: torch.Tensor, copy: torch.Tensor) -> None:
    """Keys and values of these pages one after the other, but for the layer's scales.
    pages int32 [pages], copy [2, at least as many, page, kv_heads, dim]"""
    numbers = copy[0, 0].numel()
    parts = -(-numbers // COPIED)
    sizes = (numbers, parts)
    strided = (cache.keys, cache.values, cache.keys.stride(0))
    launch(_copy_variant(copy.dtype), len(pages) * parts, *strided, pages, copy[0], copy[1], *sizes)


def variants(dtype: torch.dtype) -> Iterator[Variant]:
    """All variants that are launched here."""
    for dim, windowed, sunk in itertools.product(DIMS, (False, True), (False, True)):
        yield _variant(dtype, dim, False, windowed, sunk)
    for dim, some in itertools.product(DIMS, (False, True)):
        yield _variant(dtype, dim, True, some, False)
        yield _merge_variant(dtype, dim, some)
    yield _copy_variant(dtype)


def _variant(dtype: torch.dtype, dim: int, split: bool, windowed: bool, sunk: bool) -> Variant:
    kind = f"*{TRITON_TYPES[dtype]}"
    given = (kind, "i32", "*i16", "*i16", "i32", "*i32", "*i32", "*i32", "fp32")
    made = ("*fp32", "*fp32") if split else (kind, kind)  # the latter is not written
    constants = {"DIM": dim, "GROUP": GROUP, "PAGE": PAGE_SIZE, "TOKENS": TOKENS[dim]}
    constants |= {"SPLIT": int(split), "WINDOWED": int(windowed), "SINKS": int(sunk)}
    arguments, aligned = (*given, *made, "*fp32", *["i32"] * 4), (0, 1, 2, 3, 4, 9)
    every = tuple(constants.items())
    return Variant("attend_fp8", arguments, aligned, every, warps=WARPS, stages=STAGES)


def _merge_variant(dtype: torch.dtype, dim: int, sunk: bool) -> Variant:
    arguments = ("*fp32", "*fp32", f"*{TRITON_TYPES[dtype]}", "*fp32", "i32", "i32")
    constants = (("DIM", dim), ("SPLITS", SPLITS), ("SINKS", int(sunk)))
    return Variant("merge_splits", arguments, (0, 2), constants)


def _copy_variant(dtype: torch.dtype) -> Variant:
    kind, kept = f"*{TRITON_TYPES[dtype]}", f"*{TRITON_TYPES[FP8]}"
    arguments = (kept, kept, "i32", "*i32", kind, kind, "i32", "i32")
    return Variant("copy_pages", arguments, (0, 1, 2, 4, 5, 6), (("BLOCK", COPIED),))
