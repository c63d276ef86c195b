"""Between the QKV product and attention, in one pass over a step's rows: norms of queries and keys
where the model has them, rotary turn, keys and values into the cache. One program a row.

Pads go to slot 0, the dummy page, so a captured piece runs for more rows than a step has.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kvline_server.kernels.interface import Heads, KVLayer, Where
from kvline_server.memory.pages import PAGE_SIZE


@triton.jit  # type: ignore[untyped-decorator]
def _turned(  # type: ignore[no-untyped-def]
    base,
    weight,
    cos,
    sin,
    eps,
    COUNT: tl.constexpr,
    PADDED: tl.constexpr,
    DIM: tl.constexpr,
    NORM: tl.constexpr,
):
    """Both halves of COUNT heads at base, normed and turned, in float32."""
    half = tl.arange(0, DIM // 2)
    at = tl.arange(0, PADDED)[:, None] * DIM + half[None, :]
    there = (tl.arange(0, PADDED) < COUNT)[:, None]
    left = tl.load(base + at, mask=there, other=0.0).to(tl.float32)
    right = tl.load(base + at + DIM // 2, mask=there, other=0.0).to(tl.float32)
    if NORM:
        square = (tl.sum(left * left, axis=1) + tl.sum(right * right, axis=1)) / DIM
        scale = tl.rsqrt(square + eps)[:, None]
        left = left * scale * tl.load(weight + half)[None, :].to(tl.float32)
        right = right * scale * tl.load(weight + DIM // 2 + half)[None, :].to(tl.float32)
    return left * cos - right * sin, right * cos + left * sin, at, there


@triton.jit  # type: ignore[untyped-decorator]
def _write(  # type: ignore[no-untyped-def]
    heads,
    row_stride,
    q_norm,
    k_norm,
    eps,
    rope,
    positions,
    slots,
    keys,
    values,
    page_stride,
    token_stride,
    Q: tl.constexpr,
    KV: tl.constexpr,
    Q_PADDED: tl.constexpr,
    KV_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
):
    row = tl.program_id(0)
    base = heads + row.to(tl.int64) * row_stride
    half = tl.arange(0, DIM // 2)
    turn = rope + tl.load(positions + row).to(tl.int64) * DIM
    cos = tl.load(turn + half)[None, :]
    sin = tl.load(turn + DIM // 2 + half)[None, :]
    left, right, at, there = _turned(base, q_norm, cos, sin, eps, Q, Q_PADDED, DIM, NORM)
    kind = heads.dtype.element_ty
    tl.store(base + at, left.to(kind), mask=there)
    tl.store(base + at + DIM // 2, right.to(kind), mask=there)
    slot = tl.load(slots + row)
    place = (slot // PAGE) * page_stride + (slot % PAGE) * token_stride
    base += Q * DIM
    left, right, at, there = _turned(base, k_norm, cos, sin, eps, KV, KV_PADDED, DIM, NORM)
    tl.store(keys + place + at, left.to(kind), mask=there)
    tl.store(keys + place + at + DIM // 2, right.to(kind), mask=there)
    base += KV * DIM
    for part in tl.static_range(2):
        offset = at + part * (DIM // 2)
        tl.store(values + place + offset, tl.load(base + offset, mask=there), mask=there)


def write(heads: Heads, rope: torch.Tensor, where: Where, cache: KVLayer) -> None:
    """rope float32 [positions, dim]: all cosines, then all sines"""
    rows, _, dim = heads.fused.shape
    normed = heads.q_norm is not None and heads.k_norm is not None
    launch: Any = _write[(rows,)]
    launch(
        heads.fused,
        heads.fused.stride(0),
        heads.q_norm if normed else heads.fused,
        heads.k_norm if normed else heads.fused,
        heads.eps,
        rope,
        where.positions,
        where.slots,
        cache.keys,
        cache.values,
        cache.keys.stride(0),
        cache.keys.stride(1),
        Q=heads.queries,
        KV=heads.keys,
        Q_PADDED=triton.next_power_of_2(heads.queries),
        KV_PADDED=triton.next_power_of_2(heads.keys),
        DIM=dim,
        PAGE=PAGE_SIZE,
        NORM=normed,
    )
