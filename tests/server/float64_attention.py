"""Attention in float64, the oracle of the tests of all backends."""

from __future__ import annotations

import torch

from kvline_server.kernels.layout import Layout
from kvline_server.memory.arena import KVLayer


def expected(
    q: torch.Tensor,
    cache: KVLayer,
    layout: Layout,
    window: int,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """float64 [rows, heads, dim]; sinks are a logit more, which is dropped behind the softmax. A
    row sees all before it, a span's all before its end, and both as much of that as is no further
    from the row than the window."""
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    (held,) = layout.groups
    last = torch.arange(layout.rows, device=q.device)  # rows that each row sees
    if layout.spans is not None:
        for first, end in zip(layout.spans.starts, layout.spans.ends, strict=True):
            last[first:end] = int(end) - 1
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
        hidden = token > (last[rows] + length - rows.stop).unsqueeze(1)
        if window:
            hidden |= token <= query - window
        scores = (scores * scale).masked_fill_(hidden, float("-inf"))
        if sinks is not None:
            more = sinks.double().view(-1, 1, 1).expand(-1, len(query), 1)
            scores = torch.cat((scores, more), dim=-1)
        shares = scores.softmax(dim=-1)[..., :length]
        out[rows] = torch.einsum("hrn,nhd->rhd", shares, values.repeat_interleave(group, 1))
    return out
