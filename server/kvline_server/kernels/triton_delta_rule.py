"""Triton kernels of the gated delta rule; kernels/cubins.py compiles and launches them.

`delta_rows` computes few rows of a sequence one after the other: decodes. What bounds it is the
state, which is read and written once. Longer sequences are computed in tiles of rows: `delta_lines`
convolves all of them at once, `delta_tiles` does what no state is needed for, and `delta_pass`
takes each sequence's state through its tiles. Reference: kernels/torch_chunks.py.
"""

import triton
import triton.language as tl

from kvline_server.kernels.triton_kernels import _after_the_last
from kvline_server.kernels.triton_recurrent import (
    EPSILON,
    NONE,
    _copy,
    _filtered,
    _keep,
    _kept,
    _sigmoid,
    _silu,
    _softplus,
    _taps,
)

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
    x, stride, weight, inputs, lines, ba, ba_stride, a_log, dt_bias, matrices, out, out_stride,
    spans, slots, sources, key_heads, heads,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """COLUMNS of a value head's state of a sequence a program, which also convolves its values.
    `lines` are queries and keys, by convolve_rows, which may still run while the state is loaded:
    it changes none of it."""
    blocks: tl.constexpr = DIM // COLUMNS
    block, both = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    sequence, head = both // heads, both % heads
    slot, source = tl.load(slots + sequence), tl.load(sources + sequence)
    first, end = tl.load(spans + 2 * sequence), tl.load(spans + 2 * sequence + 1)
    at, column = tl.arange(0, DIM), block * COLUMNS + tl.arange(0, COLUMNS)
    place, size = head * DIM * DIM + at[:, None] * DIM + column[None, :], heads * DIM * DIM
    read = (source != NONE) & (slot != NONE)
    loaded = tl.load(matrices + source * size + place, mask=read, other=0.0)
    value, channels = (2 * key_heads + head) * DIM + column, (2 * key_heads + heads) * DIM
    old0, old1, old2 = _kept(inputs, source, channels, value, read, WIDTH)
    w0, w1, w2, w3 = _taps(weight, value, WIDTH)
    _after_the_last()
    if slot == NONE:  # padding
        for turn in range(end - first):
            empty = tl.zeros((COLUMNS,), out.dtype.element_ty)
            own = out + (first + turn).to(tl.int64) * out_stride + head * DIM
            tl.store(own + column, empty)
        return
    state, key = loaded.to(tl.float32), head // (heads // key_heads) * DIM + at
    for turn in range(end - first):
        row = (first + turn).to(tl.int64)
        line = lines + row * (2 * key_heads * DIM)
        q, k = tl.load(line + key), tl.load(line + key_heads * DIM + key)
        v = tl.load(x + row * stride + value).to(tl.float32)
        made = _silu(w0 * old0 + w1 * old1 + w2 * old2 + w3 * v)
        old0, old1, old2 = old1, old2, v
        share, decay = _gates(ba, ba_stride, a_log, dt_bias, row, True, head, heads)
        decay = tl.exp(decay)
        # Both of the state as it was: sums over warps wait for each other once.
        found = tl.sum(state * k[:, None], axis=0)
        asked = tl.sum(state * q[:, None], axis=0)
        new = (made - decay * found) * share
        made = decay * asked + tl.sum(k * q) * new
        state = decay * state + k[:, None] * new[None, :]
        tl.store(out + row * out_stride + head * DIM + column, made.to(out.dtype.element_ty))
    tl.store(matrices + slot * size + place, state.to(matrices.dtype.element_ty))
    _keep(inputs, slot, channels, value, old0, old1, old2, WIDTH)


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
    between = tl.where(
        (to // SIZE != of // SIZE) & (to // (2 * SIZE) == of // (2 * SIZE)), lower, 0
    )
    half = tl.dot(between, inverse, input_precision=PRECISION)
    return inverse - tl.dot(inverse, half, input_precision=PRECISION)


@triton.jit
def delta_lines(
    x, stride, weight, inputs, tiles, sources, qs, ks, vs, key_heads, heads,
    DIM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The convolution of a tile of rows of a head a program: queries and keys of length 1, values.
    Each [ROWS, DIM] is one after the other in memory, which the next kernels read."""
    _after_the_last()
    lines = 2 * key_heads + heads
    tile, line = tl.program_id(0) // lines, tl.program_id(0) % lines
    start, count = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1)
    first, source = tl.load(tiles + 3 * tile + 2), tl.load(sources + tile)
    dim = tl.arange(0, DIM)
    made = _filtered(
        x, stride, weight, x, inputs, source, lines * DIM, start, count, first, line * DIM + dim,
        False, WIDTH, ROWS,
    )  # fmt: skip
    at = tl.arange(0, ROWS)[:, None] * DIM + dim[None, :]
    kind: tl.constexpr = qs.dtype.element_ty
    if line < 2 * key_heads:
        made *= tl.rsqrt(tl.sum(made * made, axis=1) + EPSILON)[:, None]
        if line < key_heads:
            made *= 1.0 / tl.sqrt(DIM * 1.0)
            place = (tile * key_heads + line).to(tl.int64) * (ROWS * DIM)
            tl.store(qs + place + at, made.to(kind))
        else:
            place = (tile * key_heads + line - key_heads).to(tl.int64) * (ROWS * DIM)
            tl.store(ks + place + at, made.to(kind))
    else:
        place = (tile * heads + line - 2 * key_heads).to(tl.int64) * (ROWS * DIM)
        tl.store(vs + place + at, made.to(kind))


@triton.jit
def delta_tiles(
    ba, ba_stride, a_log, dt_bias, tiles, qs, ks, vs, ws, ps, gs, key_heads, heads,
    DIM: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of rows of a value head a program. It leaves what each row adds to the state but for
    the state, transposed, in place of the values, [DIM, ROWS], and what that is multiplied by, ws
    [ROWS, DIM]; what rows have of each other, ps [ROWS, ROWS]; the sum of decays' logarithms, gs
    [ROWS]."""
    _after_the_last()
    tile, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    start, count = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1)
    at, dim = tl.arange(0, ROWS), tl.arange(0, DIM)
    index = (tile * heads + head).to(tl.int64)
    shared = (tile * key_heads + head // (heads // key_heads)).to(tl.int64) * (ROWS * DIM)
    square = at[:, None] * DIM + dim[None, :]
    k, q = tl.load(ks + shared + square), tl.load(qs + shared + square)
    share, decay = _gates(ba, ba_stride, a_log, dt_bias, start + at, at < count, head, heads)
    total = tl.cumsum(decay, axis=0)
    tl.store(gs + index * ROWS + at, total)
    kind: tl.constexpr = qs.dtype.element_ty
    lower = at[:, None] >= at[None, :]
    faded = tl.exp(tl.where(lower, total[:, None] - total[None, :], float("-inf")))
    shares = at[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    tl.store(ps + index * (ROWS * ROWS) + shares, (tl.dot(q, tl.trans(k)) * faded).to(kind))
    upper = at[:, None] < at[None, :]
    ahead = tl.exp(tl.where(upper, total[None, :] - total[:, None], float("-inf")))
    inverse = _solved(tl.dot(k, tl.trans(k)) * ahead * share[None, :], at, ROWS, PRECISION)
    keyed = (inverse * (share * tl.exp(total))[None, :]).to(kind)
    tl.store(ws + index * (ROWS * DIM) + square, tl.dot(keyed, k).to(kind))
    v = tl.load(vs + index * (ROWS * DIM) + square)
    added = tl.dot((inverse * share[None, :]).to(kind), v).to(kind)
    turned = dim[:, None] * ROWS + at[None, :]
    tl.debug_barrier()
    tl.store(vs + index * (ROWS * DIM) + turned, tl.trans(added))


@triton.jit
def delta_short(
    x, stride, ba, ba_stride, a_log, dt_bias, tiles, sources, slots, qs, ks, vs, inputs, matrices,
    out, out_stride, key_heads, heads, DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A sequence of one tile, of a value head, a program: what delta_tiles and delta_pass do, and
    nothing but the state goes through memory. COLUMNS of the state at a time."""
    _after_the_last()
    tile, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    start, count = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1)
    source, slot = tl.load(sources + tile), tl.load(slots + tile)
    at, dim, key_head = tl.arange(0, ROWS), tl.arange(0, DIM), head // (heads // key_heads)
    shared = (tile * key_heads + key_head).to(tl.int64) * (ROWS * DIM)
    square = at[:, None] * DIM + dim[None, :]
    k, q = tl.load(ks + shared + square), tl.load(qs + shared + square)
    share, decay = _gates(ba, ba_stride, a_log, dt_bias, start + at, at < count, head, heads)
    total, end = tl.cumsum(decay, axis=0), tl.sum(decay)
    kind: tl.constexpr = qs.dtype.element_ty
    lower, upper = at[:, None] >= at[None, :], at[:, None] < at[None, :]
    faded = tl.exp(tl.where(lower, total[:, None] - total[None, :], float("-inf")))
    asked = (tl.dot(q, tl.trans(k)) * faded).to(kind)
    ahead = tl.exp(tl.where(upper, total[None, :] - total[:, None], float("-inf")))
    inverse = _solved(tl.dot(k, tl.trans(k)) * ahead * share[None, :], at, ROWS, PRECISION)
    solved = (inverse * share[None, :]).to(kind)
    reach, left = tl.exp(total)[:, None], tl.exp(end - total)[:, None]
    channels, size = (2 * key_heads + heads) * DIM, heads * DIM * DIM
    for block in range(DIM // COLUMNS):
        column = block * COLUMNS + tl.arange(0, COLUMNS)
        place = head * DIM * DIM + dim[:, None] * DIM + column[None, :]
        index = (tile * heads + head).to(tl.int64) * (ROWS * DIM)
        v = tl.load(vs + index + at[:, None] * DIM + column[None, :])
        made = tl.zeros((ROWS, COLUMNS), tl.float32)
        if source != NONE:
            kept = tl.load(matrices + source * size + place)
            before = kept.to(kind)
            v = (v.to(tl.float32) - reach * tl.dot(k, before)).to(kind)
            made = reach * tl.dot(q, before)
        new = tl.dot(solved, v)
        made = tl.dot(asked, new.to(kind), made)
        where = out + (start + at).to(tl.int64)[:, None] * out_stride + head * DIM + column[None, :]
        tl.store(where, made.to(out.dtype.element_ty), mask=(at < count)[:, None])
        if slot != NONE:
            state = tl.dot(tl.trans(k), (new * left).to(kind))
            if source != NONE:
                # A second time: it need not be kept meanwhile.
                kept = tl.load(matrices + source * size + place)
                state += kept.to(tl.float32) * tl.exp(end)
            tl.store(matrices + slot * size + place, state.to(matrices.dtype.element_ty))
            _leave(
                x, stride, inputs, slot, channels, start + count, key_head, key_heads, head, heads,
                column, DIM, WIDTH,
            )  # fmt: skip


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
