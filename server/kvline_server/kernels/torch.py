"""Every operation of a step in plain torch: the CPU backend, the reference for the tests, and the
fallback on GPUs without prebuilt kernels.

Attention gathers the pages of the KV cache into a workspace that is kept, because memory that is
mapped anew for each layer costs more than the gather. It holds GATHER_TOKENS from the first step
on, which takes the memory before it is measured, and grows to the longest sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention, silu

from kvline_server.kernels.interface import (
    LOGIT_BLOCK,
    Draws,
    Fetch,
    Heads,
    PageTables,
    RowScores,
    SlotMapping,
)
from kvline_server.kernels.layout import Layout
from kvline_server.kernels.row_counts import padded_rows, row_counts
from kvline_server.kernels.torch_rows import choose_rows, score_rows
from kvline_server.kernels.tuning import Choices
from kvline_server.memory.arena import KVLayer
from kvline_server.memory.pages import DUMMY_PAGE, PAGE_SIZE, pages_for

GATHER_TOKENS = 8192  # of one decode group, padding included
MASKED = float("-inf")


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decodes that share a gather: rows start..end of the step, one token each."""

    start: int
    end: int
    pages: torch.Tensor  # [sequences * pages per sequence]
    mask: torch.Tensor | None  # [sequences, 1, 1, tokens], added to the scores


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """One sequence's chunk: rows start..end of the step, attending to `length` cached tokens."""

    start: int
    end: int
    length: int
    pages: torch.Tensor  # [pages]
    mask: torch.Tensor | None  # [end - start, length] added to the scores; None: plain causal


Part = TypeVar("Part", DecodeGroup, PrefillPart)


@dataclass(frozen=True, slots=True)
class TorchPlan:
    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillPart, ...]


class _HostArrays:
    """A Fetch that is complete at once: a view on the CPU, a blocking copy on a GPU."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.arrays = [tensor.cpu().numpy() for tensor in tensors]

    def wait(self) -> list[np.ndarray]:
        return self.arrays


class TorchKernels:
    captures = False

    def __init__(
        self, dtype: torch.dtype = torch.float32, depth: int = 0, device: str = "cpu"
    ) -> None:
        self.device = torch.device(device)
        self.dtype = dtype
        self.depth = depth  # tests set 1 for the order of steps that a GPU has
        self.gathered = torch.empty((2, 0))  # keys and values of one gather

    def upload(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        return [torch.from_numpy(array).to(self.device) for array in arrays]

    def fetch(self, tensors: list[torch.Tensor]) -> Fetch:
        return _HostArrays(tensors)

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Reorders to oneDNN's blocked layout, which is faster than the default GEMM at the few
        rows of decoding (docs/performance.md)."""
        if not _use_onednn(weight):
            return weight
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
        return packed

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if weight.is_mkldnn or _use_onednn(weight):
            made: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        else:
            made = functional.linear(x, weight, bias)
        return made if out is None else out.copy_(made)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight, eps)

    def add_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = residual + x
        return self.rms_norm(total, weight, eps), total

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return silu(gate).mul_(up)

    def rope_table(self, inverse_frequencies: torch.Tensor, positions: int) -> torch.Tensor:
        """[positions, 2, dim / 2]"""
        angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies)
        return torch.stack((angles.cos(), angles.sin()), dim=1).to(self.device, self.dtype)

    def padded(self, rows: int) -> int:
        return padded_rows(rows) if self._compiles else rows

    def row_counts(self, largest: int) -> list[int]:
        return row_counts(largest) if self._compiles else []

    @property
    def _compiles(self) -> bool:
        """Whether oneDNN runs the GEMMs, which compiles code for each row count."""
        return _onednn_takes(self.device.type, self.dtype)

    def plan(self, layout: Layout) -> TorchPlan:
        chunks = range(layout.decodes, layout.sequences)
        return TorchPlan(
            decodes=tuple(self._on_device(group) for group in _decode_groups(layout)),
            prefills=tuple(self._on_device(_prefill_part(layout, i)) for i in chunks),
        )

    def plan_in_place(self, tables: PageTables) -> TorchPlan:
        raise NotImplementedError("nothing is captured: captures is False")

    def _on_device(self, part: Part) -> Part:
        """Copies a part of the plan to the device."""
        mask = None if part.mask is None else part.mask.to(self.device, self.dtype)
        return replace(part, pages=part.pages.to(self.device), mask=mask)

    def write(self, heads: Heads, rope: torch.Tensor, mapping: SlotMapping, cache: KVLayer) -> None:
        q, k, v = heads.split()
        turned = rope[mapping.positions]
        if heads.q_norm is not None and heads.k_norm is not None:
            q, k = (
                self.rms_norm(x, norm, heads.eps)
                for x, norm in ((q, heads.q_norm), (k, heads.k_norm))
            )
        heads.fused[:, : heads.queries] = _apply_rope(q, turned)
        k = _apply_rope(k, turned)
        page, token = mapping.slots // PAGE_SIZE, mapping.slots % PAGE_SIZE
        cache.keys[page, token] = k
        cache.values[page, token] = v

    def attend(
        self, q: torch.Tensor, cache: KVLayer, plan: TorchPlan, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        rows, heads, dim = q.shape
        flat = q.new_empty((rows, heads * dim)) if out is None else out
        made = flat.view(rows, heads, dim)
        for group in plan.decodes:
            made[group.start : group.end] = self._decode(q[group.start : group.end], cache, group)
        for part in plan.prefills:
            made[part.start : part.end] = self._prefill(q[part.start : part.end], cache, part)
        # Pads go on through the layers into the dummy page, which must stay finite.
        made[max([g.end for g in plan.decodes] + [p.end for p in plan.prefills]) :] = 0
        return flat

    def _gather(self, cache: KVLayer, pages: torch.Tensor, sequences: int) -> list[torch.Tensor]:
        """Keys and values, each [sequences, kv_heads, tokens, dim], out of the paged cache. They
        are valid until the next call."""
        shape = (len(pages), *cache.keys.shape[1:])
        size = math.prod(shape)
        if self.gathered.shape[1] < size:
            self.gathered = cache.keys.new_empty((2, 0))  # frees it before it is replaced
            least = GATHER_TOKENS * math.prod(shape[2:])
            self.gathered = cache.keys.new_zeros((2, max(size, least)))
        found = []
        for stored, into in zip((cache.keys, cache.values), self.gathered, strict=True):
            out = torch.index_select(stored, 0, pages, out=into[:size].view(shape))
            found.append(out.view(sequences, -1, *shape[2:]).transpose(1, 2))
        return found

    def _decode(self, q: torch.Tensor, cache: KVLayer, group: DecodeGroup) -> torch.Tensor:
        """q [sequences, heads, dim] -> the same shape. Heads of a GQA group act as query
        positions."""
        sequences, heads, dim = q.shape
        keys, values = self._gather(cache, group.pages, sequences)
        grouped = q.reshape(sequences, keys.shape[1], -1, dim)
        out = scaled_dot_product_attention(grouped, keys, values, attn_mask=group.mask)
        return out.reshape(sequences, heads, dim)

    def _prefill(self, q: torch.Tensor, cache: KVLayer, part: PrefillPart) -> torch.Tensor:
        """q [rows, heads, dim] of one sequence -> the same shape."""
        keys, values = (kv[:, :, : part.length] for kv in self._gather(cache, part.pages, 1))
        out = scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            keys,
            values,
            attn_mask=part.mask,
            is_causal=part.mask is None,
            enable_gqa=True,
        )
        return out.squeeze(0).transpose(0, 1)

    def tune(
        self, weights: list[list[torch.Tensor]], rows: list[int], known: Choices | None
    ) -> None:
        return

    def graphs(self, decoder: Any, cache: list[KVLayer], max_rows: int) -> None:
        return

    def logits(self, hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """In blocks of a fixed row count, the last one padded, so that neither the chunk size nor
        a row's neighbours change a bit of its logits."""
        rows = hidden.shape[0]
        if hidden.is_cuda:  # where bits depend on more than the row count
            return self.linear(hidden, head).float()
        out = torch.empty((rows, head.shape[0]), dtype=torch.float32)
        for start in range(0, rows, LOGIT_BLOCK):
            block = hidden[start : start + LOGIT_BLOCK]
            have = block.shape[0]
            if have < LOGIT_BLOCK:
                block = torch.cat((block, block.new_zeros(LOGIT_BLOCK - have, block.shape[1])))
            out[start : start + have] = self.linear(block, head)[:have]
        return out

    def score(self, logits: torch.Tensor, targets: torch.Tensor, top: int) -> RowScores:
        return score_rows(logits, targets, top)

    def choose(self, logits: torch.Tensor, draws: Draws) -> torch.Tensor:
        return choose_rows(logits, draws)


def _use_onednn(weight: torch.Tensor) -> bool:
    return _onednn_takes(weight.device.type, weight.dtype)


def _onednn_takes(device: str, dtype: torch.dtype) -> bool:
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return device == "cpu" and dtype == torch.float32 and available


def _apply_rope(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rotates halves (the NeoX layout). x [rows, heads, dim], rope [rows, 2, dim / 2]"""
    cos, sin = rope[:, 0].unsqueeze(1), rope[:, 1].unsqueeze(1)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def _decode_groups(layout: Layout) -> list[DecodeGroup]:
    """Consecutive decodes share a gather while padding to the longest stays in GATHER_TOKENS."""
    groups: list[DecodeGroup] = []
    start = 0
    while start < layout.decodes:
        end, widest = start, 0
        while end < layout.decodes:
            width = max(widest, pages_for(int(layout.lengths[end])))
            if end > start and width * (end + 1 - start) * PAGE_SIZE > GATHER_TOKENS:
                break
            end, widest = end + 1, width
        groups.append(_decode_group(layout, start, end, widest))
        start = end
    return groups


def _decode_group(layout: Layout, start: int, end: int, width: int) -> DecodeGroup:
    pages = np.full((end - start, width), DUMMY_PAGE, dtype=np.int64)
    for row in range(start, end):
        own = layout.pages[layout.page_starts[row] : layout.page_starts[row + 1]]
        pages[row - start, : len(own)] = own
    hidden = np.arange(width * PAGE_SIZE)[None, :] >= layout.lengths[start:end, None]
    mask = torch.zeros(hidden.shape).masked_fill_(torch.from_numpy(hidden), MASKED)
    return DecodeGroup(
        start=start,
        end=end,
        pages=torch.from_numpy(pages.reshape(-1)),
        mask=mask.view(end - start, 1, 1, -1),
    )


def _prefill_part(layout: Layout, index: int) -> PrefillPart:
    start, end = int(layout.row_starts[index]), int(layout.row_starts[index + 1])
    length = int(layout.lengths[index])
    cached = length - (end - start)
    mask = None
    if cached:
        future = torch.ones(end - start, length, dtype=torch.bool).triu_(cached + 1)
        mask = torch.zeros(end - start, length).masked_fill_(future, MASKED)
    pages = layout.pages[layout.page_starts[index] : layout.page_starts[index + 1]]
    return PrefillPart(start, end, length, torch.from_numpy(pages.astype(np.int64)), mask)
