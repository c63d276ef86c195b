"""Every operation of a step in plain torch: the CPU's backend, and the reference for any other.

Attention reads the paged cache by gathering pages; the workspace of one gather is bounded, so a
batch of many sequences never needs more than the longest one alone or GATHER_TOKENS.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

__all__ = [
    "DecodeGroup",
    "KVLayer",
    "PrefillPart",
    "append",
    "apply_rope",
    "decode_attention",
    "linear",
    "pack",
    "prefill_attention",
    "rms_norm",
    "rope_table",
    "silu_and_mul",
]

GATHER_TOKENS = 8192  # of one decode group, padding included


@dataclass(frozen=True, slots=True)
class KVLayer:
    """One layer's slice of the arena."""

    keys: torch.Tensor  # [pages, page, kv_heads, dim]
    values: torch.Tensor  # [pages, page, kv_heads, dim]


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decoding sequences gathered together: rows start..end of the step, one token each."""

    start: int
    end: int
    pages: torch.Tensor  # [sequences * pages per sequence]
    mask: torch.Tensor  # [sequences, 1, 1, tokens], added to the scores


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """One sequence's chunk: rows start..end of the step, attending to `length` cached tokens."""

    start: int
    end: int
    length: int
    pages: torch.Tensor  # [pages]
    mask: torch.Tensor | None  # [end - start, length] added to the scores; None: plain causal


def pack(weight: torch.Tensor) -> torch.Tensor:
    """The weight in oneDNN's blocked layout, in place of the plain one: faster than the default
    product at the few rows of decoding (docs/performance.md)."""
    if not _use_onednn(weight):
        return weight
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, in] times weight [out, in], packed or plain. -> [rows, out]"""
    if weight.is_mkldnn or _use_onednn(weight):
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
    return functional.linear(x, weight, bias)


def _use_onednn(weight: torch.Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    )


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu of the first half times the second. [tokens, 2 * d] -> [tokens, d]"""
    gate, up = x.chunk(2, dim=-1)
    return silu(gate).mul_(up)


def rope_table(
    inverse_frequencies: torch.Tensor, positions: int, dtype: torch.dtype
) -> torch.Tensor:
    """cos and sin of every position. [positions, 2, dim / 2]"""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies)
    return torch.stack((angles.cos(), angles.sin()), dim=1).to(dtype)


def apply_rope(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rotates halves (the NeoX layout). x [tokens, heads, dim], rope [tokens, 2, dim / 2]"""
    cos, sin = rope[:, 0].unsqueeze(1), rope[:, 1].unsqueeze(1)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def append(cache: KVLayer, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Writes k and v [tokens, kv_heads, dim] into the cache's slots [tokens]."""
    cache.keys.view(-1, *k.shape[1:]).index_copy_(0, slots, k)
    cache.values.view(-1, *v.shape[1:]).index_copy_(0, slots, v)


def _gather(pages: torch.Tensor, indices: torch.Tensor, sequences: int) -> torch.Tensor:
    """[sequences, kv_heads, tokens, dim] out of the paged cache."""
    found = pages.index_select(0, indices)
    return found.view(sequences, -1, *pages.shape[2:]).transpose(1, 2)


def decode_attention(q: torch.Tensor, cache: KVLayer, group: DecodeGroup) -> torch.Tensor:
    """q [sequences, heads, dim] -> the same shape. Grouped heads ride as query positions."""
    sequences, heads, dim = q.shape
    keys = _gather(cache.keys, group.pages, sequences)
    values = _gather(cache.values, group.pages, sequences)
    grouped = q.view(sequences, keys.shape[1], -1, dim)
    out = scaled_dot_product_attention(grouped, keys, values, attn_mask=group.mask)
    return out.reshape(sequences, heads, dim)


def prefill_attention(q: torch.Tensor, cache: KVLayer, part: PrefillPart) -> torch.Tensor:
    """q [tokens, heads, dim] of one sequence -> the same shape."""
    keys = _gather(cache.keys, part.pages, 1)[:, :, : part.length]
    values = _gather(cache.values, part.pages, 1)[:, :, : part.length]
    out = scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        keys,
        values,
        attn_mask=part.mask,
        is_causal=part.mask is None,
        enable_gqa=True,
    )
    return out.squeeze(0).transpose(0, 1)
