"""Every operation of a step in plain torch: the CPU backend, the reference for the tests, and the
fallback on GPUs without prebuilt kernels.

Attention gathers the pages of the KV cache into a workspace that is kept, because memory that is
mapped anew for each layer costs more than the gather. It holds GATHER_TOKENS from the first step
on, which takes the memory before it is measured, and grows to the longest sequence.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch.nn import functional
from torch.nn.functional import gelu, scaled_dot_product_attention, silu

from kvline_server.kernels.fp8 import Weight
from kvline_server.kernels.group import ALONE, Group
from kvline_server.kernels.interface import (
    LOGIT_BLOCK,
    PLAIN,
    AttentionOptions,
    Fetch,
    Heads,
    Kernels,
    PartScores,
    RowScores,
    SlotMapping,
)
from kvline_server.kernels.layout import Draws, Layout
from kvline_server.kernels.projection import Norm, Operand, Projection
from kvline_server.kernels.row_counts import compiled, padded
from kvline_server.kernels.torch_rows import best_rows, choose_rows, part_rows, score_rows
from kvline_server.kernels.tuning import Choices
from kvline_server.memory.arena import KVLayer
from kvline_server.memory.pages import PAGE_SIZE, pages_for

GATHER_TOKENS = 8192  # of one decode group, padding included
MASKED = float("-inf")


@dataclass(frozen=True, slots=True)
class Part:
    """Rows start..end of the step that share a gather: decodes with a token each, or one sequence's
    chunk."""

    start: int
    end: int
    tokens: int  # gathered of each sequence, padding included
    pages: torch.Tensor  # [sequences * pages per sequence]
    positions: torch.Tensor  # of the rows [end - start]
    decodes: bool
    masks: dict[int, torch.Tensor] = field(default_factory=dict)  # by window; layers share them

    def mask(self, window: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Added to the scores. [end - start, tokens]; None: plain causal"""
        window = window if window < self.tokens else 0
        if not (self.decodes or window or self.end - self.start < self.tokens):
            return None
        if window not in self.masks:
            queries = self.positions.unsqueeze(1)
            keys = torch.arange(self.tokens, device=queries.device)
            hidden = keys > queries
            if window:
                hidden |= keys <= queries - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=keys.device)
            self.masks[window] = mask.masked_fill_(hidden, MASKED)
        return self.masks[window]


class _HostArrays:
    """A Fetch that is complete at once: a view on the CPU, a blocking copy on a GPU."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.arrays = [tensor.cpu().numpy() for tensor in tensors]

    def wait(self) -> list[np.ndarray]:
        return self.arrays


class TorchKernels(Kernels):
    plan_in_place = None  # nothing is captured

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        depth: int = 0,
        device: str = "cpu",
        group: Group = ALONE,
    ) -> None:
        self.device = torch.device(device)
        self.dtype = dtype
        self.depth = depth  # tests set 1 for the order of steps that a GPU has
        self.group = group
        # Keys and values of one gather.
        self.gathered = torch.empty((2, 0), dtype=dtype, device=self.device)

    def upload(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        return [torch.from_numpy(array).to(self.device) for array in arrays]

    def fetch(self, tensors: list[torch.Tensor]) -> Fetch:
        return _HostArrays(tensors)

    def pack(self, weight: Weight) -> Weight:
        """Reorders to oneDNN's blocked layout, which is faster than the default GEMM at the few
        rows of decoding (docs/performance.md)."""
        assert isinstance(weight, torch.Tensor)  # fp8 is not kept
        if not _use_onednn(weight):
            return weight
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
        return packed

    def linear(
        self, x: Operand, projection: Projection, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert isinstance(projection.weight, torch.Tensor)  # fp8 is not kept
        made = _linear(self.settle(x), projection.weight, projection.bias)
        return made if out is None else out.copy_(made)

    def rms_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return functional.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> torch.Tensor:
        return self.rms_norm(residual.add_(x), norm)

    def activate_and_mul(self, x: torch.Tensor, activation: str) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return (silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")).mul_(up)

    def rope_table(self, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[positions, 2, dim / 2]"""
        return torch.stack((cos, sin), dim=1).to(self.device, self.dtype)

    def padded(self, rows: int) -> int:
        return padded(rows, dense=True) if self._compiles else rows

    def row_counts(self, largest: int) -> list[int]:
        return compiled(largest) if self._compiles else []

    @property
    def _compiles(self) -> bool:
        """Whether oneDNN runs the GEMMs, which compiles code for each row count."""
        return _onednn_takes(self.device.type, self.dtype)

    def plan(self, layout: Layout) -> list[Part]:
        groups = [(*group, True) for group in _decode_groups(layout)]
        groups += [(i, i + 1, False) for i in range(layout.decodes, layout.sequences)]
        return [self._part(layout, *group) for group in groups]

    def _part(self, layout: Layout, first: int, end: int, decodes: bool) -> Part:
        """Of the sequences first..end."""
        starts = layout.page_starts[first : end + 1]
        pages = np.empty((end - first, np.diff(starts).max()), dtype=np.int64)
        for row, (start, stop) in enumerate(itertools.pairwise(starts)):
            pages[row, : stop - start] = layout.pages[start:stop]
            # Its own: what is behind its end is multiplied by 0, and that of others may be NaN.
            pages[row, stop - start :] = layout.pages[stop - 1]
        rows = slice(int(layout.row_starts[first]), int(layout.row_starts[end]))
        positions = torch.from_numpy(layout.positions[rows].astype(np.int64))
        return Part(
            start=rows.start,
            end=rows.stop,
            tokens=pages.shape[1] * PAGE_SIZE if decodes else int(layout.lengths[first]),
            pages=torch.from_numpy(pages.reshape(-1)).to(self.device),
            positions=positions.to(self.device),
            decodes=decodes,
        )

    def write(self, heads: Heads, rope: torch.Tensor, mapping: SlotMapping, cache: KVLayer) -> None:
        q, k, v = heads.split()
        turned = rope[mapping.positions]
        if heads.q_norm is not None and heads.k_norm is not None:
            q, k = (
                self.rms_norm(x, Norm(norm, heads.eps))
                for x, norm in ((q, heads.q_norm), (k, heads.k_norm))
            )
        heads.fused[:, : heads.queries] = _apply_rope(q, turned)
        k = _apply_rope(k, turned)
        page, token = mapping.slots // PAGE_SIZE, mapping.slots % PAGE_SIZE
        _store(cache.keys, (page, token), k, cache.scales.keys)
        _store(cache.values, (page, token), v, cache.scales.values)

    def attend(
        self,
        q: torch.Tensor,
        cache: KVLayer,
        plan: list[Part],
        out: torch.Tensor | None = None,
        options: AttentionOptions = PLAIN,
    ) -> torch.Tensor:
        rows, heads, dim = q.shape
        flat = q.new_empty((rows, heads * dim)) if out is None else out
        made = flat.view(rows, heads, dim)
        scale = (options.scale or 1.0 / math.sqrt(dim)) * cache.scales.keys
        options = replace(options, scale=scale)
        for part in plan:
            own, attention = slice(part.start, part.end), self._prefill
            if part.decodes:
                attention = self._decode
            made[own] = attention(q[own], cache, part, options)
        return flat if cache.scales.values == 1.0 else flat.mul_(cache.scales.values)

    def _gather(self, cache: KVLayer, pages: torch.Tensor, sequences: int) -> list[torch.Tensor]:
        """Keys and values, each [sequences, kv_heads, tokens, dim], out of the paged cache. They
        are valid until the next call."""
        shape = (len(pages), *cache.keys.shape[1:])
        size = math.prod(shape)
        if self.gathered.shape[1] < size:
            self.gathered = self.gathered.new_empty((2, 0))  # frees it before it is replaced
            least = GATHER_TOKENS * math.prod(shape[2:])
            self.gathered = self.gathered.new_zeros((2, max(size, least)))
        found = []
        for stored, into in zip((cache.keys, cache.values), self.gathered, strict=True):
            out = into[:size].view(shape)
            if stored.dtype == self.dtype:
                torch.index_select(stored, 0, pages, out=out)
            else:
                some = stored.view(torch.uint8).index_select(0, pages)
                out.copy_(some.view(stored.dtype))
            found.append(out.view(sequences, -1, *shape[2:]).transpose(1, 2))
        return found

    def _decode(
        self, q: torch.Tensor, cache: KVLayer, part: Part, options: AttentionOptions
    ) -> torch.Tensor:
        """q [sequences, heads, dim] -> the same shape. Heads of a GQA group act as query
        positions."""
        sequences, heads, dim = q.shape
        keys, values = self._gather(cache, part.pages, sequences)
        mask = part.mask(options.window, self.dtype)
        assert mask is not None  # for the padding
        out = scaled_dot_product_attention(
            q.reshape(sequences, keys.shape[1], -1, dim),
            keys,
            values,
            attn_mask=mask.view(sequences, 1, 1, -1),
            scale=options.scale,
        )
        return out.reshape(sequences, heads, dim)

    def _prefill(
        self, q: torch.Tensor, cache: KVLayer, part: Part, options: AttentionOptions
    ) -> torch.Tensor:
        """q [rows, heads, dim] of one sequence -> the same shape."""
        keys, values = (kv[:, :, : part.tokens] for kv in self._gather(cache, part.pages, 1))
        mask = part.mask(options.window, self.dtype)
        out = scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=options.scale,
            enable_gqa=True,
        )
        return out.squeeze(0).transpose(0, 1)

    def tune(self, weights: list[list[Weight]], rows: list[int], known: Choices | None) -> None:
        return

    def logits(self, hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """In blocks of a fixed row count, the last one padded, so that neither the chunk size nor
        a row's neighbours change a bit of its logits."""
        rows = hidden.shape[0]
        if hidden.is_cuda:  # where bits depend on more than the row count
            return _linear(hidden, head).float()
        out = torch.empty((rows, head.shape[0]), dtype=torch.float32)
        for start in range(0, rows, LOGIT_BLOCK):
            block = hidden[start : start + LOGIT_BLOCK]
            have = block.shape[0]
            if have < LOGIT_BLOCK:
                block = torch.cat((block, block.new_zeros(LOGIT_BLOCK - have, block.shape[1])))
            out[start : start + have] = _linear(block, head)[:have]
        return out

    def part_scores(self, logits: torch.Tensor, chosen: torch.Tensor, top: int) -> PartScores:
        return part_rows(logits, chosen, top)

    def best(self, logits: torch.Tensor, draws: Draws, first: int) -> torch.Tensor:
        return best_rows(logits, draws, first)

    def score(self, logits: torch.Tensor, targets: torch.Tensor, top: int) -> RowScores:
        return score_rows(logits, targets, top)

    def choose(self, logits: torch.Tensor, draws: Draws) -> torch.Tensor:
        return choose_rows(logits, draws)


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    if weight.is_mkldnn or _use_onednn(weight):
        made: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return made
    return functional.linear(x, weight, bias)


def _use_onednn(weight: torch.Tensor) -> bool:
    return _onednn_takes(weight.device.type, weight.dtype)


def _onednn_takes(device: str, dtype: torch.dtype) -> bool:
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return device == "cpu" and dtype == torch.float32 and available


def _store(
    stored: torch.Tensor, at: tuple[torch.Tensor, torch.Tensor], x: torch.Tensor, scale: float
) -> None:
    """Keys or values into the cache. An fp8 one is written as bytes, which every device can index;
    the cast to fp8 does not saturate."""
    if stored.dtype != x.dtype:
        most = torch.finfo(stored.dtype).max
        x = (x.float() / scale).clamp_(-most, most).to(stored.dtype).view(torch.uint8)
        stored = stored.view(torch.uint8)
    stored[at] = x


def _apply_rope(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rotates halves (the NeoX layout). x [rows, heads, dim], rope [rows, 2, dim / 2]"""
    cos, sin = rope[:, 0].unsqueeze(1), rope[:, 1].unsqueeze(1)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def _decode_groups(layout: Layout) -> Iterator[tuple[int, int]]:
    """Consecutive decodes share a gather while padding to the longest stays in GATHER_TOKENS."""
    start = 0
    while start < layout.decodes:
        end, widest = start, 0
        while end < layout.decodes:
            width = max(widest, pages_for(int(layout.lengths[end])))
            if end > start and width * (end + 1 - start) * PAGE_SIZE > GATHER_TOKENS:
                break
            end, widest = end + 1, width
        yield start, end
        start = end
