"""Attention over the paged KV cache, and what is done to queries, keys and values before it.

Sequences are planned once a step for each group of layers, in host memory, and its layers use the
plan. A window is the number of tokens that a query sees, itself included; 0: all before it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvline_server.kernels.layout import Layout
from kvline_server.memory.arena import KVLayer


@dataclass(frozen=True, slots=True)
class SlotMapping:
    """Each row's position in its sequence, and the KV-cache slot of its key and value."""

    positions: torch.Tensor  # int32 or int64 [rows]
    slots: torch.Tensor  # int64 [rows]


@dataclass(frozen=True, slots=True)
class PageTables:
    """Rows and pages of the sequences of one attention call, on host and device."""

    row_starts: np.ndarray  # int32 [sequences + 1], from 0
    page_starts: np.ndarray  # int32 [sequences + 1], from 0
    lengths: np.ndarray  # int32 [sequences]
    device_row_starts: torch.Tensor
    device_page_starts: torch.Tensor
    pages: torch.Tensor  # int32
    last_page: torch.Tensor  # int32 [sequences], tokens in each one's last page


@dataclass(frozen=True, slots=True)
class Heads:
    """One layer's queries, keys and values: the output of the QKV GEMM."""

    fused: torch.Tensor  # [rows, heads + 2 * kv_heads, dim]
    queries: int  # heads
    keys: int  # key heads, and as many value heads
    q_norm: torch.Tensor | None  # [dim]
    k_norm: torch.Tensor | None
    eps: float

    def split(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = torch.split(self.fused, [self.queries, self.keys, self.keys], dim=1)
        return q, k, v


# Rows, or one less than the context has pages: FlashInfer's fa2 runs such chunks over an fp8 cache,
# and has a kernel each for up to 16, up to 64 and more rows, times the queries of a key-value head.
# CUDA loads a kernel when it first runs: these numbers reach all that service does. A CPU has no
# kernels for these alone, which would be 3 of 25 s of SmolLM2's start.
SHORT_CHUNKS = (2, 8, 32, 128)


PAGE_NUMBER = 4  # bytes, in a table


class Attention(ABC):
    # Steps that the stress set plays for attention alone.
    tiles_context: bool = False  # holds nothing for each row and token of its context
    short_chunks: tuple[int, ...] = ()  # rows that reach each of its kernels

    @property
    @abstractmethod
    def plan_in_place(self) -> Callable[[PageTables, int], Any] | None:
        """A plan of decodes in layers with a window for a captured graph: planned again with the
        same addresses and number of sequences, it changes what the graph attends to. None where
        nothing can be captured."""

    @abstractmethod
    def plan(self, layout: Layout, group: int, window: int) -> Any:
        """Prepares a step's attention in one of the layout's groups, whose queries see `window`
        tokens, themselves included, or with 0 all before them; the group's layers use the
        result."""

    def table_page_bytes(self, rows: int, queries: int) -> int:
        """Bytes of a page in a sequence's table while steps run, in layers with one window, whose
        decodes have so many rows with so many queries of a key-value head each. Here each row has a
        table of its own, in two steps."""
        return 2 * PAGE_NUMBER * rows

    @abstractmethod
    def rope_table(self, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """float32 [positions, pairs of elements that are rotated], twice -> both in the layout that
        `write` reads."""

    @abstractmethod
    def write(
        self, heads: Heads, rope: torch.Tensor | None, mapping: SlotMapping, cache: KVLayer
    ) -> None:
        """Applies QK norm and rotary embedding (if the model has them), writes keys and values to
        the cache. Of a head the first elements are rotated, as many as the table has, in halves
        (the NeoX layout). Changes queries in place, and possibly keys."""

    @abstractmethod
    def attend(
        self,
        q: torch.Tensor,
        cache: KVLayer,
        plan: Any,
        out: torch.Tensor | None = None,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of q [rows, heads, dim] over the cache, causal but within spans. `scale` is
        that of query times key; None: 1 / sqrt(dim). `sinks`, float32 [heads]: a logit more in each
        head's softmax, which has no value. -> [rows, heads * dim]"""
