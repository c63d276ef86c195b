"""Attention in plain torch: that of the CPU, the reference for the tests, and for GPUs without
prebuilt kernels.

It gathers the pages of the KV cache into a workspace that is kept, because memory that is mapped
anew for each layer costs more than the gather. It holds GATHER_TOKENS from the first step on, which
takes the memory before it is measured, and grows to the longest sequence.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvline_server.kernels.attention import (
    PAGE_NUMBER,
    SHORT_CHUNKS,
    Attention,
    Heads,
    SlotMapping,
)
from kvline_server.kernels.layout import GroupLayout, Layout
from kvline_server.kernels.projection import Norm
from kvline_server.kernels.rows import Rows
from kvline_server.memory.arena import KVLayer
from kvline_server.memory.pages import PAGE_SIZE, pages_for

GATHER_TOKENS = 8192  # of one decode group, padding included
# At a time, where heads have sinks: scores of a key-value head, which stay in a cache; and rows, of
# which fewer share more of their window.
SCORES, ROWS = 1 << 20, 64
MASKED = float("-inf")


@dataclass(slots=True)
class Gather:
    """Rows start..end of the step that share a gather: decodes with as many rows each, or one
    prompt's chunk."""

    start: int
    end: int
    tokens: int  # gathered of each sequence, padding included
    pages: torch.Tensor  # [sequences * pages per sequence]
    decodes: int  # sequences; 0: a prompt's chunk, or a part of one
    causal: bool  # else each of these rows sees all of them
    # Added to the scores, [end - start, tokens]; None: of causal rows each sees all before it, of
    # others all tokens.
    mask: torch.Tensor | None
    window: int  # of tokens that a row sees; 0: all before it

    def repeat_mask(self, queries: int) -> None:
        """For so many queries of each row, which are the same in all calls."""
        if self.mask is not None and len(self.mask) == self.end - self.start:
            self.mask = self.mask.repeat_interleave(queries, 0)


class TorchAttention(Attention):
    plan_in_place = None  # nothing is captured

    def __init__(self, device: torch.device, dtype: torch.dtype, rows: Rows) -> None:
        self.device = device
        self.dtype = dtype
        self.rows = rows
        self.short_chunks = () if device.type == "cpu" else SHORT_CHUNKS
        # Keys and values of one gather.
        self.gathered = torch.empty((2, 0), dtype=dtype, device=device)

    def rope_table(self, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[positions, 2, pairs]"""
        return torch.stack((cos, sin), dim=1).to(self.device, self.dtype)

    def table_page_bytes(self, rows: int, queries: int) -> int:
        """In the tables of the sequence, the step and its gather, with masks."""
        masks = 1 if rows == 1 else rows * queries  # the queries of a single row share its mask
        return 4 * PAGE_NUMBER + masks * PAGE_SIZE * self.dtype.itemsize

    def plan(self, layout: Layout, group: int, window: int) -> list[Gather]:
        layout, spans = layout.whole()
        held, counts = layout.groups[group], np.diff(layout.row_starts)
        together = _decodes_together(counts[: layout.decodes].tolist(), held.lengths)
        gathers = [(first, end, end - first) for first, end in together]
        gathers += [(i, i + 1, 0) for i in range(layout.decodes, layout.sequences)]
        # Of a sequence's last row the position among its tokens here is the last.
        rows = np.arange(layout.rows) - np.repeat(layout.row_starts[1:], counts)
        positions = rows + np.repeat(held.lengths, counts)
        return [
            self._plan_gather(layout, held, positions, window, not spans[each[0]], *each)
            for each in gathers
        ]

    def _plan_gather(
        self,
        layout: Layout,
        held: GroupLayout,
        positions: np.ndarray,
        window: int,
        causal: bool,
        first: int,
        end: int,
        decodes: int,
    ) -> Gather:
        """Of the sequences first..end; `positions` are those of all rows."""
        starts = held.page_starts[first : end + 1]
        pages = np.empty((end - first, np.diff(starts).max()), dtype=np.int64)
        for row, (start, stop) in enumerate(itertools.pairwise(starts)):
            pages[row, : stop - start] = held.pages[start:stop]
            # Its own: what is behind its end is multiplied by 0, and that of others may be NaN.
            pages[row, stop - start :] = held.pages[stop - 1]
        rows = slice(int(layout.row_starts[first]), int(layout.row_starts[end]))
        tokens = pages.shape[1] * PAGE_SIZE if decodes else int(held.lengths[first])
        return Gather(
            start=rows.start,
            end=rows.stop,
            tokens=tokens,
            pages=torch.from_numpy(pages.reshape(-1)).to(self.device),
            decodes=decodes,
            causal=causal,
            mask=self._mask(positions[rows], tokens, window, decodes, causal),
            window=window,
        )

    def _mask(
        self, positions: np.ndarray, tokens: int, window: int, decodes: int, causal: bool
    ) -> torch.Tensor | None:
        some = causal and len(positions) < tokens  # see less than the last
        if not (decodes or 0 < window < tokens or some):
            return None
        queries = torch.from_numpy(positions).to(self.device).unsqueeze(1)
        keys = torch.arange(tokens, device=self.device)
        hidden = keys > (queries if causal else tokens)
        if window:
            hidden = hidden | (keys <= queries - window)
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(hidden, MASKED)

    def write(
        self, heads: Heads, rope: torch.Tensor | None, mapping: SlotMapping, cache: KVLayer
    ) -> None:
        q, k, v = heads.split()
        if heads.q_norm is not None and heads.k_norm is not None:
            q, k = (
                self.rows.rms_norm(x, Norm(norm, heads.eps))
                for x, norm in ((q, heads.q_norm), (k, heads.k_norm))
            )
        if rope is not None:
            turned = rope[mapping.positions]
            q, k = _apply_rope(q, turned), _apply_rope(k, turned)
        heads.fused[:, : heads.queries] = q
        page, token = mapping.slots // PAGE_SIZE, mapping.slots % PAGE_SIZE
        _store(cache.keys, (page, token), k, cache.scales.keys)
        _store(cache.values, (page, token), v, cache.scales.values)

    def attend(
        self,
        q: torch.Tensor,
        cache: KVLayer,
        plan: list[Gather],
        out: torch.Tensor | None = None,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows, heads, dim = q.shape
        flat = q.new_empty((rows, heads * dim)) if out is None else out
        made = flat.view(rows, heads, dim)
        scale = (scale or 1.0 / math.sqrt(dim)) * cache.scales.keys
        for gather in plan:
            own, attention = slice(gather.start, gather.end), self._prefill
            if gather.decodes:
                attention = self._decode
            if sinks is None:
                made[own] = attention(q[own], cache, gather, scale)
            else:
                self._attend_with_sinks(q[own], cache, gather, scale, sinks, made[own])
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
        self, q: torch.Tensor, cache: KVLayer, gather: Gather, scale: float
    ) -> torch.Tensor:
        """q [sequences * rows of each, heads, dim] -> the same shape. Heads of a GQA group act as
        query positions, those of each row one after the other."""
        rows, heads, dim = q.shape
        sequences, each = gather.decodes, rows // gather.decodes
        keys, values = self._gather(cache, gather.pages, sequences)
        kv = keys.shape[1]
        if each > 1:  # the queries of a single row share its mask
            gather.repeat_mask(heads // kv)
        assert gather.mask is not None  # for the padding
        grouped = (sequences, each, kv, heads // kv, dim)
        out = scaled_dot_product_attention(
            q.view(grouped).transpose(1, 2).reshape(sequences, kv, -1, dim),
            keys,
            values,
            attn_mask=gather.mask.view(sequences, 1, -1, gather.tokens),
            scale=scale,
        )
        return out.view(sequences, kv, each, -1, dim).transpose(1, 2).reshape(rows, heads, dim)

    def _prefill(
        self, q: torch.Tensor, cache: KVLayer, gather: Gather, scale: float
    ) -> torch.Tensor:
        """q [rows, heads, dim] of one sequence -> the same shape."""
        keys, values = (kv[:, :, : gather.tokens] for kv in self._gather(cache, gather.pages, 1))
        out = scaled_dot_product_attention(
            q.transpose(0, 1).unsqueeze(0),
            keys,
            values,
            attn_mask=gather.mask,
            is_causal=gather.causal and gather.mask is None,
            scale=scale,
            enable_gqa=True,
        )
        return out.squeeze(0).transpose(0, 1)

    def _attend_with_sinks(
        self,
        q: torch.Tensor,
        cache: KVLayer,
        gather: Gather,
        scale: float,
        sinks: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """q [sequences * rows of each, heads, dim] -> out of the same shape, a key-value
        head and a block of rows at a time. In float32: torch's own attention takes no sinks."""
        assert gather.causal, "no model has sinks and images"
        sequences, tokens = gather.decodes or 1, gather.tokens
        keys, values = (
            part[:, :, :tokens].float() for part in self._gather(cache, gather.pages, sequences)
        )
        kv, dim = keys.shape[1], q.shape[2]
        by_head = (sequences, q.shape[0] // sequences, kv, -1, dim)
        q, out, sinks = q.view(by_head), out.view(by_head), sinks.view(kv, 1, -1, 1)
        each, mask = q.shape[1], gather.mask
        if mask is not None:
            # Attention without sinks repeats it for the queries of a key-value head.
            mask = mask.view(sequences, each, -1, tokens)[:, :, 0]
        for some, seen in _blocks(gather, each, SCORES // (sequences * q.shape[3])):
            if mask is None:
                added = keys.new_full((1, len(some), len(seen)), MASKED).triu_(some.start + 1)
            else:
                added = mask[:, some.start : some.stop, seen.start : seen.stop]
            for head in range(kv):
                own = slice(some.start, some.stop), head
                k, v = (part[:, head, seen.start : seen.stop] for part in (keys, values))
                rows = q[:, *own].float() * scale
                out[:, *own] = _with_sinks(rows, k, v, added.unsqueeze(2), sinks[head])


def _blocks(gather: Gather, each: int, most: int) -> Iterator[tuple[range, range]]:
    """Rows, of the `each` that a sequence has, and the tokens that these rows see: up to `most`
    pairs of both, or one row. What is behind the window of a block's first row is not read."""
    if gather.decodes:  # of several lengths
        step = max(1, most // gather.tokens)
        for start in range(0, each, step):
            yield range(start, min(start + step, each)), range(gather.tokens)
        return
    before, start = gather.tokens - each, 0
    while start < each:
        first = max(0, before + start + 1 - gather.window) if gather.window else 0
        step = max(1, min(ROWS, most // (before + start + ROWS - first)))
        stop = min(start + step, each)
        yield range(start, stop), range(first, before + stop)
        start = stop


def _with_sinks(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """Of one key-value head. The sink is in the softmax's sum and no more. q [sequences, rows,
    heads, dim], keys and values [sequences, tokens, dim], mask [sequences, rows, 1, tokens],
    added, sinks [1, heads, 1]; all float32 but for the mask -> as q"""
    sequences, rows, heads, dim = q.shape
    scores = q.reshape(sequences, -1, dim) @ keys.transpose(1, 2)
    scores = scores.view(sequences, rows, heads, -1).add_(mask)
    most = scores.amax(dim=-1, keepdim=True).maximum(sinks)
    weights = scores.sub_(most).exp_()
    total = weights.sum(dim=-1, keepdim=True) + (sinks - most).exp()
    return (weights.flatten(1, 2) @ values).view(q.shape).div_(total)


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
    """x [rows, heads, dim], rope [rows, 2, pairs] -> as x"""
    cos, sin = rope[:, 0].unsqueeze(1), rope[:, 1].unsqueeze(1)
    pairs = rope.shape[2]
    left, right, rest = torch.split(x, [pairs, pairs, x.shape[2] - 2 * pairs], dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin, rest), dim=-1)


def _decodes_together(counts: list[int], lengths: np.ndarray) -> Iterator[tuple[int, int]]:
    """Consecutive decodes of as many rows share a gather while padding to the longest stays in
    GATHER_TOKENS."""
    start = 0
    while start < len(counts):
        end, widest = start, 0
        while end < len(counts) and counts[end] == counts[start]:
            width = max(widest, pages_for(int(lengths[end])))
            if end > start and width * (end + 1 - start) * PAGE_SIZE > GATHER_TOKENS:
                break
            end, widest = end + 1, width
        yield start, end
        start = end
