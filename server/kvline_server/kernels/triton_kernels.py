"""What no library has, as Triton kernels; kernels/cubins.py makes them runnable.

`score` and `draw` take a row of logits a program. Scoring reads each logit once and needs no fp32
copy of the chunk. Drawing takes a number a row from outside, so that a seeded request says the same
whoever sits beside it (a library's generator is shared by the batch). `write` takes a row of a step
from the QKV product to attention: norms of queries and keys where the model has them, rotary turn,
keys and values into the cache. Reference: kernels/torch_rows.py; the tests compare the two.
"""

import triton
import triton.language as tl


@triton.jit
def score(logits, stride, targets, values, ranks, normalisers, vocabulary, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    start_of_row = logits + row.to(tl.int64) * stride
    chosen = tl.load(start_of_row + tl.load(targets + row)).to(tl.float32)
    most = -1.0e30
    total = tl.zeros((BLOCK,), tl.float32)
    above = tl.zeros((BLOCK,), tl.int32)
    # One maximum a block and not a lane: an exponential a logit, which is what the time goes to.
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(start_of_row + at, mask=at < vocabulary, other=-1.0e30).to(tl.float32)
        above += (x > chosen).to(tl.int32)
        now = tl.maximum(most, tl.max(x, axis=0))
        total = total * tl.exp(most - now) + tl.exp(x - now)
        most = now
    normaliser = most + tl.log(tl.sum(total, axis=0))
    tl.store(values + row, chosen - normaliser)
    tl.store(normalisers + row, normaliser)
    tl.store(ranks + row, tl.sum(above, axis=0) + 1)


@triton.jit
def draw(
    weights,
    stride,
    temperatures,
    uniforms,
    chosen,
    vocabulary,
    LOGITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    start_of_row = weights + row.to(tl.int64) * stride
    scale = 1.0
    most = 0.0
    if LOGITS:
        scale = 1.0 / tl.load(temperatures + row)
        highest = tl.full((BLOCK,), -1.0e30, tl.float32)
        for start in range(0, vocabulary, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(start_of_row + at, mask=at < vocabulary, other=-1.0e30).to(tl.float32)
            highest = tl.maximum(highest, x)
        most = tl.max(highest, axis=0)
    # Sums block by block, in the same order twice, so that the last sum is the total to the bit.
    total = 0.0
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(start_of_row + at, mask=at < vocabulary, other=-1.0e30).to(tl.float32)
        w = tl.exp((x - most) * scale) if LOGITS else tl.maximum(x, 0.0)
        total += tl.sum(w, axis=0)
    wanted = tl.load(uniforms + row) * total
    below = 0.0
    start = 0
    last = 0
    found = -1
    while (found < 0) & (start < vocabulary):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(start_of_row + at, mask=at < vocabulary, other=-1.0e30).to(tl.float32)
        w = tl.exp((x - most) * scale) if LOGITS else tl.maximum(x, 0.0)
        after = below + tl.sum(w, axis=0)
        # The last token with any weight: where rounding would point past the end.
        last = tl.maximum(last, tl.max(tl.where(w > 0.0, at, 0), axis=0))
        if after > wanted:
            sums = below + tl.cumsum(w, axis=0)
            index = start + tl.sum((sums <= wanted).to(tl.int32), axis=0)
            found = tl.minimum(index, last)
        below = after
        start += BLOCK
    tl.store(chosen + row, tl.where(found >= 0, found, last).to(tl.int64))


@triton.jit
def _turned(
    base,
    weight,
    cos,
    sin,
    eps,
    count,
    PADDED: tl.constexpr,
    DIM: tl.constexpr,
    NORM: tl.constexpr,
):
    """Both halves of `count` heads at base, normed and turned, in float32."""
    half = tl.arange(0, DIM // 2)
    at = tl.arange(0, PADDED)[:, None] * DIM + half[None, :]
    there = (tl.arange(0, PADDED) < count)[:, None]
    left = tl.load(base + at, mask=there, other=0.0).to(tl.float32)
    right = tl.load(base + at + DIM // 2, mask=there, other=0.0).to(tl.float32)
    if NORM:
        square = (tl.sum(left * left, axis=1) + tl.sum(right * right, axis=1)) / DIM
        scale = tl.rsqrt(square + eps)[:, None]
        left = left * scale * tl.load(weight + half)[None, :].to(tl.float32)
        right = right * scale * tl.load(weight + DIM // 2 + half)[None, :].to(tl.float32)
    return left * cos - right * sin, right * cos + left * sin, at, there


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
    left, right, at, there = _turned(base, q_norm, cos, sin, eps, queries, Q_PADDED, DIM, NORM)
    kind = heads.dtype.element_ty
    tl.store(base + at, left.to(kind), mask=there)
    tl.store(base + at + DIM // 2, right.to(kind), mask=there)
    slot = tl.load(slots + row)
    place = (slot // PAGE) * page_stride + (slot % PAGE) * token_stride
    base += queries * DIM
    left, right, at, there = _turned(base, k_norm, cos, sin, eps, kv, KV_PADDED, DIM, NORM)
    tl.store(keys + place + at, left.to(kind), mask=there)
    tl.store(keys + place + at + DIM // 2, right.to(kind), mask=there)
    base += kv * DIM
    for part in tl.static_range(2):
        offset = at + part * (DIM // 2)
        tl.store(values + place + offset, tl.load(base + offset, mask=there), mask=there)
