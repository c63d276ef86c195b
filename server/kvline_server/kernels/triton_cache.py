"""`write` of triton_kernels.py into an fp8 KV cache: keys and values are divided by the scales of
their layer. Reference: kernels/torch.py; the tests compare the two.
"""

import triton
import triton.language as tl

from kvline_server.kernels.triton_kernels import _after_the_last, _turned

MOST = tl.constexpr(448.0)  # of e4m3, to which larger numbers are clamped


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
    keys_inverse,
    values_inverse,
    Q_PADDED: tl.constexpr,
    KV_PADDED: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    NORM: tl.constexpr,
):
    _after_the_last()
    row = tl.program_id(0)
    base = heads + row.to(tl.int64) * row_stride
    half = tl.arange(0, DIM // 2)
    turn = rope + tl.load(positions + row).to(tl.int64) * DIM
    cos = tl.load(turn + half)[None, :]
    sin = tl.load(turn + DIM // 2 + half)[None, :]
    left, right, at, there = _turned(base, q_norm, cos, sin, eps, queries, Q_PADDED, DIM, NORM)
    kind = heads.dtype.element_ty
    tl.store(base + at, left.to(kind), mask=there)
    tl.store(base + at + DIM // 2, right.to(kind), mask=there)
    slot = tl.load(slots + row)
    place = (slot // PAGE) * page_stride + (slot % PAGE) * token_stride
    base += queries * DIM
    left, right, at, there = _turned(base, k_norm, cos, sin, eps, kv, KV_PADDED, DIM, NORM)
    _put(keys + place + at, left * keys_inverse, there)
    _put(keys + place + at + DIM // 2, right * keys_inverse, there)
    base += kv * DIM
    for part in tl.static_range(2):
        offset = at + part * (DIM // 2)
        value = tl.load(base + offset, mask=there).to(tl.float32)
        _put(values + place + offset, value * values_inverse, there)
