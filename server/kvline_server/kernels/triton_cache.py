"""Between the QKV GEMM and attention, a program per row of a step: QK norm where the model has it,
rotary embedding, keys and values into the cache; into one of fp8 divided by the scales of their
layer. Reference: kernels/torch_attention.py; the tests compare the two.
"""

import triton
import triton.language as tl

from kvline_server.kernels.triton_kernels import _after_the_last

MOST = tl.constexpr(448.0)  # of e4m3, to which larger numbers are clamped


@triton.jit
def _angles(rope, position, pairs, DIM: tl.constexpr):
    """Cosines and sines of a head's DIM / 2 pairs of elements, of which the first `pairs` are
    rotated; and where the elements of each pair are: behind the rotated ones come the others, in
    halves too. `pairs` is a multiple of 16, so eight elements in a row stay together."""
    half = tl.arange(0, DIM // 2)
    rotated = half < pairs
    turn = rope + position.to(tl.int64) * 2 * pairs + half
    cos = tl.load(turn, mask=rotated, other=1.0)[None, :]
    sin = tl.load(turn + pairs, mask=rotated, other=0.0)[None, :]
    left = half + tl.where(rotated, 0, pairs)
    right = half + tl.where(rotated, pairs, DIM // 2)
    left = tl.max_contiguous(tl.multiple_of(left, 8), 8)
    right = tl.max_contiguous(tl.multiple_of(right, 8), 8)
    return cos, sin, left, right


@triton.jit
def _turned(
    base,
    weight,
    cos,
    sin,
    left_at,
    right_at,
    eps,
    count,
    PADDED: tl.constexpr,
    DIM: tl.constexpr,
    NORM: tl.constexpr,
):
    """Both elements of each pair of `count` heads at base, normed and rotated, in float32; and
    where they are."""
    head = tl.arange(0, PADDED)[:, None]
    lefts, rights = head * DIM + left_at[None, :], head * DIM + right_at[None, :]
    there = head < count
    left = tl.load(base + lefts, mask=there, other=0.0).to(tl.float32)
    right = tl.load(base + rights, mask=there, other=0.0).to(tl.float32)
    if NORM:
        square = (tl.sum(left * left, axis=1) + tl.sum(right * right, axis=1)) / DIM
        scale = tl.rsqrt(square + eps)[:, None]
        left = left * scale * tl.load(weight + left_at)[None, :].to(tl.float32)
        right = right * scale * tl.load(weight + right_at)[None, :].to(tl.float32)
    return left * cos - right * sin, right * cos + left * sin, lefts, rights, there


@triton.jit
def _rotated(
    heads,
    row_stride,
    q_norm,
    k_norm,
    eps,
    rope,
    position,
    queries,
    kv,
    pairs,
    Q_PADDED: tl.constexpr,
    KV_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    NORM: tl.constexpr,
):
    """Of a row: queries, in their place. -> keys as `_turned` has them, and where values are"""
    base = heads + tl.program_id(0).to(tl.int64) * row_stride
    cos, sin, one, other = _angles(rope, position, pairs, DIM)
    left, right, lefts, rights, there = _turned(
        base, q_norm, cos, sin, one, other, eps, queries, Q_PADDED, DIM, NORM
    )
    kind = heads.dtype.element_ty
    tl.store(base + lefts, left.to(kind), mask=there)
    tl.store(base + rights, right.to(kind), mask=there)
    base += queries * DIM
    left, right, lefts, rights, there = _turned(
        base, k_norm, cos, sin, one, other, eps, kv, KV_PADDED, DIM, NORM
    )
    return left, right, lefts, rights, there, base + kv * DIM


@triton.jit
def _place(slots, page_stride, token_stride, PAGE: tl.constexpr):
    """Of the row's token in a layer's cache."""
    slot = tl.load(slots + tl.program_id(0))
    return (slot // PAGE) * page_stride + (slot % PAGE) * token_stride


@triton.jit
def write(
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
    queries,
    kv,
    pairs,
    Q_PADDED: tl.constexpr,
    KV_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
):
    _after_the_last()
    position = tl.load(positions + tl.program_id(0))
    left, right, lefts, rights, there, base = _rotated(
        heads, row_stride, q_norm, k_norm, eps, rope, position, queries, kv, pairs,
        Q_PADDED, KV_PADDED, DIM, NORM,
    )  # fmt: skip
    place = _place(slots, page_stride, token_stride, PAGE)
    kind = keys.dtype.element_ty
    tl.store(keys + place + lefts, left.to(kind), mask=there)
    tl.store(keys + place + rights, right.to(kind), mask=there)
    tl.store(values + place + lefts, tl.load(base + lefts, mask=there), mask=there)
    tl.store(values + place + rights, tl.load(base + rights, mask=there), mask=there)


@triton.jit
def _put(into, x, there):
    """Stores float32 numbers as e4m3; a NaN stays one."""
    x = tl.clamp(x, -MOST, MOST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(into, x.to(into.dtype.element_ty), mask=there)


@triton.jit
def write_fp8(
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
    queries,
    kv,
    pairs,
    keys_inverse,
    values_inverse,
    Q_PADDED: tl.constexpr,
    KV_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
):
    _after_the_last()
    position = tl.load(positions + tl.program_id(0))
    left, right, lefts, rights, there, base = _rotated(
        heads, row_stride, q_norm, k_norm, eps, rope, position, queries, kv, pairs,
        Q_PADDED, KV_PADDED, DIM, NORM,
    )  # fmt: skip
    place = _place(slots, page_stride, token_stride, PAGE)
    _put(keys + place + lefts, left * keys_inverse, there)
    _put(keys + place + rights, right * keys_inverse, there)
    left = tl.load(base + lefts, mask=there).to(tl.float32)
    right = tl.load(base + rights, mask=there).to(tl.float32)
    _put(values + place + lefts, left * values_inverse, there)
    _put(values + place + rights, right * values_inverse, there)
