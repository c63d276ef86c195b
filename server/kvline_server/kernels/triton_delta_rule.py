"""Triton kernels of the gated delta rule; kernels/cubins.py compiles and launches them.

`delta_rows` computes few rows of a sequence one after the other: decodes. What bounds it is the
state, which is read and written once. Longer sequences are computed in tiles of rows, by two
kernels: `delta_tiles`, all of them at once, does what no state is needed for; `delta_pass` takes
each sequence's state through its tiles. Reference: kernels/torch_chunks.py.
"""

import triton
import triton.language as tl

from kvline_server.kernels.triton_kernels import _after_the_last
from kvline_server.kernels.triton_recurrent import (
    NONE,
    _copy,
    _filtered,
    _filtered_row,
    _sigmoid,
    _shift,
    _softplus,
)

EPSILON = tl.constexpr(1e-6)  # of the length of queries and keys
BLOCK = tl.constexpr(16)  # rows whose system is solved row by row


@triton.jit
def _gates(ba, stride, a_log, dt_bias, row, real, head, heads):
    """Share and logarithm of the decay of rows of a value head; 0 where they are not real."""
    own = ba + row.to(tl.int64) * stride + head
    b = tl.load(own, mask=real, other=0.0).to(tl.float32)
    a = tl.load(own + heads, mask=real, other=0.0).to(tl.float32)
    decay = -tl.exp(tl.load(a_log + head)) * _softplus(a + tl.load(dt_bias + head))
    return tl.where(real, _sigmoid(b), 0.0), tl.where(real, decay, 0.0)


@triton.jit
def delta_rows(
    x, stride, ba, ba_stride, weight, a_log, dt_bias, inputs, matrices, out, out_stride,
    spans, slots, sources, done, key_heads, heads,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """COLUMNS of a value head's state a program. The programs of a key head share the convolution's
    inputs of its query and key: the last of them to end, by the count in `done`, writes them."""
    _after_the_last()
    blocks: tl.constexpr = DIM // COLUMNS
    each = heads // key_heads
    parts = each * blocks
    part, both = tl.program_id(0) % parts, tl.program_id(0) // parts
    sequence, key_head = both // key_heads, both % key_heads
    slot, source = tl.load(slots + sequence), tl.load(sources + sequence)
    first, end = tl.load(spans + 2 * sequence), tl.load(spans + 2 * sequence + 1)
    head, block = key_head * each + part // blocks, part % blocks
    column, at = block * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, DIM)
    channels = (2 * key_heads + heads) * DIM
    key, value = key_head * DIM + at, 2 * key_heads * DIM + head * DIM + column
    if slot == NONE:  # padding
        for turn in range(end - first):
            row = first + turn
            empty = tl.zeros((COLUMNS,), out.dtype.element_ty)
            tl.store(out + row.to(tl.int64) * out_stride + head * DIM + column, empty)
        return
    place = head * DIM * DIM + at[:, None] * DIM + column[None, :]
    size = heads * DIM * DIM
    kept = tl.load(matrices + source * size + place, mask=source != NONE, other=0.0)
    state = kept.to(tl.float32)
    for turn in range(end - first):
        row = first + turn
        q = _filtered_row(
            x, stride, weight, x, inputs, source, channels, row, first, key, False, WIDTH
        )
        k = _filtered_row(
            x, stride, weight, x, inputs, source, channels, row, first, key_heads * DIM + key,
            False, WIDTH,
        )  # fmt: skip
        v = _filtered_row(
            x, stride, weight, x, inputs, source, channels, row, first, value, False, WIDTH
        )
        q *= tl.rsqrt(tl.sum(q * q) + EPSILON) * (1.0 / tl.sqrt(DIM * 1.0))
        k *= tl.rsqrt(tl.sum(k * k) + EPSILON)
        share, decay = _gates(ba, ba_stride, a_log, dt_bias, row, True, head, heads)
        decay = tl.exp(decay)
        # Both of the state as it was: sums over warps wait for each other once.
        found = tl.sum(state * k[:, None], axis=0)
        asked = tl.sum(state * q[:, None], axis=0)
        new = (v - decay * found) * share
        made = decay * asked + tl.sum(k * q) * new
        state = decay * state + k[:, None] * new[None, :]
        where = out + row.to(tl.int64) * out_stride + head * DIM + column
        tl.store(where, made.to(out.dtype.element_ty))
    tl.store(matrices + slot * size + place, state.to(matrices.dtype.element_ty))
    _shift(x, stride, inputs, source, slot, channels, first, end, value, WIDTH)
    before = tl.atomic_add(done + both, 1, sem="acq_rel")
    if before == parts - 1:
        tl.store(done + both, 0)
        _shift(x, stride, inputs, source, slot, channels, first, end, key, WIDTH)
        other = key_heads * DIM + key
        _shift(x, stride, inputs, source, slot, channels, first, end, other, WIDTH)


@triton.jit
def _solved(a, at, ROWS: tl.constexpr, PRECISION: tl.constexpr):
    """(I + a^T)^-1 of a strictly upper `a` [ROWS, ROWS]: by rows in BLOCKs on the diagonal, whose
    inverses are then merged. Sums of powers would be fewer steps, and lose all digits where keys
    repeat."""
    blocks: tl.constexpr = ROWS // BLOCK
    some, within = tl.arange(0, blocks), tl.arange(0, BLOCK)
    same = some[:, None, None, None] == some[None, None, :, None]
    parts = tl.reshape(a, (blocks, BLOCK, blocks, BLOCK))
    own = tl.sum(tl.where(same, parts, 0.0), axis=2)  # [blocks, from, to]
    identity = (within[:, None] == within[None, :]).to(tl.float32)
    made = tl.zeros((blocks, BLOCK, BLOCK), tl.float32) + identity[None, :, :]
    for row in tl.static_range(1, BLOCK):
        shares = tl.sum(tl.where(within[None, None, :] == row, own, 0.0), axis=2)
        line = tl.sum(shares[:, :, None] * made, axis=1)
        made -= tl.where(within[None, :, None] == row, line[:, None, :], 0.0)
    whole = tl.where(same, made[:, :, None, :], 0.0)
    inverse = tl.reshape(whole, (ROWS, ROWS))
    if ROWS > BLOCK:
        lower = tl.trans(a)
        inverse = _merged(inverse, lower, at, BLOCK, PRECISION)
        if ROWS > 2 * BLOCK:
            inverse = _merged(inverse, lower, at, 2 * BLOCK, PRECISION)
    return inverse


@triton.jit
def _merged(inverse, lower, at, SIZE: tl.constexpr, PRECISION: tl.constexpr):
    """Inverses of blocks of SIZE rows -> of twice as many."""
    to, of = at[:, None], at[None, :]
    between = tl.where((to // SIZE != of // SIZE) & (to // (2 * SIZE) == of // (2 * SIZE)), lower, 0)
    half = tl.dot(between, inverse, input_precision=PRECISION)
    return inverse - tl.dot(inverse, half, input_precision=PRECISION)


@triton.jit
def delta_tiles(
    x, stride, ba, ba_stride, weight, a_log, dt_bias, inputs, tiles, sources,
    qs, ks, ws, us, ps, gs, key_heads, heads,
    DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of rows of a key head and its value heads a program. Of each tile and head it leaves
    queries and keys [ROWS, DIM]; what each row adds to the state but for the state, transposed, and
    what that is multiplied by, us [DIM, ROWS] and ws [ROWS, DIM]; what rows have of each other, ps
    [ROWS, ROWS]; the sum of decays' logarithms, gs [ROWS]."""
    _after_the_last()
    tile, key_head = tl.program_id(0) // key_heads, tl.program_id(0) % key_heads
    start, count = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1)
    first, source = tl.load(tiles + 3 * tile + 2), tl.load(sources + tile)
    at, dim = tl.arange(0, ROWS), tl.arange(0, DIM)
    channels, each = (2 * key_heads + heads) * DIM, heads // key_heads
    kind: tl.constexpr = qs.dtype.element_ty
    key = key_head * DIM + dim
    q = _filtered(
        x, stride, weight, x, inputs, source, channels, start, count, first, key,
        False, WIDTH, ROWS,
    )  # fmt: skip
    q *= (tl.rsqrt(tl.sum(q * q, axis=1) + EPSILON) * (1.0 / tl.sqrt(DIM * 1.0)))[:, None]
    k = _filtered(
        x, stride, weight, x, inputs, source, channels, start, count, first,
        key_heads * DIM + key, False, WIDTH, ROWS,
    )  # fmt: skip
    k *= tl.rsqrt(tl.sum(k * k, axis=1) + EPSILON)[:, None]
    q, k = q.to(kind), k.to(kind)
    square = at[:, None] * DIM + dim[None, :]
    place = (tile * key_heads + key_head).to(tl.int64) * (ROWS * DIM)
    tl.store(qs + place + square, q)
    tl.store(ks + place + square, k)
    between = tl.dot(k, tl.trans(k))
    asked = tl.dot(q, tl.trans(k))
    for turn in range(each):
        head = key_head * each + turn
        index = (tile * heads + head).to(tl.int64)
        share, decay = _gates(
            ba, ba_stride, a_log, dt_bias, start + at, at < count, head, heads
        )
        total = tl.cumsum(decay, axis=0)
        tl.store(gs + index * ROWS + at, total)
        lower = at[:, None] >= at[None, :]
        faded = tl.exp(tl.where(lower, total[:, None] - total[None, :], float("-inf")))
        shares = tl.arange(0, ROWS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        tl.store(ps + index * (ROWS * ROWS) + shares, (asked * faded).to(kind))
        upper = at[:, None] < at[None, :]
        ahead = tl.exp(tl.where(upper, total[None, :] - total[:, None], float("-inf")))
        inverse = _solved(between * ahead * share[None, :], at, ROWS, PRECISION)
        keyed = (inverse * (share * tl.exp(total))[None, :]).to(kind)
        tl.store(ws + index * (ROWS * DIM) + square, tl.dot(keyed, k).to(kind))
        value = (2 * key_heads + head) * DIM + dim
        v = _filtered(
            x, stride, weight, x, inputs, source, channels, start, count, first, value,
            False, WIDTH, ROWS,
        )  # fmt: skip
        u = tl.dot((inverse * share[None, :]).to(kind), v.to(kind)).to(kind)
        turned = dim[:, None] * ROWS + at[None, :]
        tl.store(us + index * (ROWS * DIM) + turned, tl.trans(u))


@triton.jit
def delta_pass(
    x, stride, qs, ks, ws, us, ps, gs, inputs, matrices, out, out_stride,
    chains, sources, stops, slots, key_heads, heads,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """COLUMNS of a value head's state of a sequence a program. The state is transposed: then it is
    a GEMM's left side, which tensor cores read from the registers that the last one wrote, and no
    step from one tile to the next waits for shared memory. A sequence's `chains` are its first tile
    and row and its stops, first and last; a stop is the tile and row that it is before, and a slot
    to which the state is written."""
    _after_the_last()
    blocks: tl.constexpr = DIM // COLUMNS
    block, both = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    sequence, head = both // heads, both % heads
    tile, row = tl.load(chains + 4 * sequence), tl.load(chains + 4 * sequence + 1)
    stop, last = tl.load(chains + 4 * sequence + 2), tl.load(chains + 4 * sequence + 3)
    source, key_head = tl.load(sources + sequence), head // (heads // key_heads)
    at, dim = tl.arange(0, ROWS), tl.arange(0, DIM)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    channels = (2 * key_heads + heads) * DIM
    kind: tl.constexpr = qs.dtype.element_ty
    size, place = heads * DIM * DIM, head * DIM * DIM + dim[None, :] * DIM + column[:, None]
    kept = tl.load(matrices + source * size + place, mask=source != NONE, other=0.0)
    state = kept.to(tl.float32)
    square = at[:, None] * DIM + dim[None, :]
    turned = column[:, None] * ROWS + at[None, :]
    shares = at[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    while stop < last:
        until, ends = tl.load(stops + 2 * stop), tl.load(stops + 2 * stop + 1)
        slot = tl.load(slots + stop)
        for t in tl.range(tile, until, num_stages=STAGES):
            own = (t * heads + head).to(tl.int64)
            shared = (t * key_heads + key_head).to(tl.int64) * (ROWS * DIM)
            w = tl.load(ws + own * (ROWS * DIM) + square)
            u = tl.load(us + own * (ROWS * DIM) + turned)
            q = tl.load(qs + shared + square)
            p = tl.load(ps + own * (ROWS * ROWS) + shares)
            k = tl.load(ks + shared + square)
            total = tl.load(gs + own * ROWS + at)
            end = tl.load(gs + own * ROWS + ROWS - 1)
            before = state.to(kind)
            new = u.to(tl.float32) - tl.dot(before, tl.trans(w))
            made = tl.dot(before, tl.trans(q)) * tl.exp(total)[None, :]
            left = (new * tl.exp(end - total)[None, :]).to(kind)
            state = tl.dot(left, k, state * tl.exp(end))
            made = tl.dot(new.to(kind), tl.trans(p), made)
            lines = row + (t - tile) * ROWS + at
            where = out + lines.to(tl.int64)[None, :] * out_stride + head * DIM + column[:, None]
            tl.store(where, made.to(out.dtype.element_ty), mask=(lines < ends)[None, :])
        if slot != NONE:
            tl.store(matrices + slot * size + place, state.to(matrices.dtype.element_ty))
            _leave(
                x, stride, inputs, slot, channels, ends, key_head, key_heads, head, heads, column,
                DIM, WIDTH,
            )  # fmt: skip
        row += (until - tile) * ROWS
        tile = until
        stop += 1


@triton.jit
def _leave(
    x, stride, inputs, slot, channels, ends, key_head, key_heads, head, heads, column,
    DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The last inputs of the convolution before row `ends`, which are all of this step: those of
    the program's values, and the first value head's programs those of its queries and keys."""
    _copy(x, stride, inputs, slot, channels, ends, (2 * key_heads + head) * DIM + column, WIDTH)
    if head == key_head * (heads // key_heads):
        _copy(x, stride, inputs, slot, channels, ends, key_head * DIM + column, WIDTH)
        other = (key_heads + key_head) * DIM + column
        _copy(x, stride, inputs, slot, channels, ends, other, WIDTH)
