"""Triton kernels of Mamba2's scan; kernels/cubins.py compiles and launches them.

As those of the delta rule (triton_delta_rule.py): `scan_rows` computes few rows of a sequence one
after the other; of longer ones `scan_lines` convolves all tiles, `scan_tiles` does what no state is
needed for, `scan_pass` takes each sequence's state through its tiles. Reference:
kernels/torch_chunks.py.
"""

import triton
import triton.language as tl

from kvline_server.kernels.triton_kernels import _after_the_last
from kvline_server.kernels.triton_recurrent import (
    NONE,
    _copy,
    _filtered,
    _softplus,
)


@triton.jit
def scan_rows(
    lines, dt, dt_stride, a_log, dt_bias, skip, matrices, out, out_stride, spans, slots, sources,
    heads, groups, DIM: tl.constexpr, STATE: tl.constexpr,
):  # fmt: skip
    """A head's state of a sequence a program. `lines` are convolve_rows', which may still run while
    the state is loaded: it does not change the state."""
    sequence, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    slot, source = tl.load(slots + sequence), tl.load(sources + sequence)
    first, end = tl.load(spans + 2 * sequence), tl.load(spans + 2 * sequence + 1)
    own, at = head * DIM + tl.arange(0, DIM), tl.arange(0, STATE)
    size, place = heads * DIM * STATE, own[:, None] * STATE + at[None, :]
    read = (source != NONE) & (slot != NONE)
    kept = tl.load(matrices + source * size + place, mask=read, other=0.0)
    _after_the_last()
    if slot == NONE:  # padding
        for turn in range(end - first):
            empty = tl.zeros((DIM,), out.dtype.element_ty)
            tl.store(out + (first + turn).to(tl.int64) * out_stride + own, empty)
        return
    state, skipped = kept.to(tl.float32), tl.load(skip + head)
    rate, moved = tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head)
    of_b = heads * DIM + head // (heads // groups) * STATE + at
    for turn in range(end - first):
        row = (first + turn).to(tl.int64)
        line = lines + row * (heads * DIM + 2 * groups * STATE)
        b, c = tl.load(line + of_b), tl.load(line + of_b + groups * STATE)
        value = tl.load(line + own)
        delta = _softplus(tl.load(dt + row * dt_stride + head).to(tl.float32) + moved)
        state = state * tl.exp(-rate * delta) + (value * delta)[:, None] * b[None, :]
        made = tl.sum(state * c[None, :], axis=1) + skipped * value
        tl.store(out + row * out_stride + own, made.to(out.dtype.element_ty))
    tl.store(matrices + slot * size + place, state.to(matrices.dtype.element_ty))


@triton.jit
def scan_lines(
    x, stride, dt, dt_stride, weight, bias, a_log, dt_bias, inputs, tiles, sources,
    xs, bs, cs, ds, gs, heads, groups,
    DIM: tl.constexpr, STATE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    BIASED: tl.constexpr,
):  # fmt: skip
    """The convolution of a tile of rows, STATE channels a program: of some heads x [ROWS, DIM],
    delta and the sum of decays' logarithms, ds and gs [ROWS]; or a group's B or C [ROWS, STATE]."""
    _after_the_last()
    EACH: tl.constexpr = STATE // DIM
    wide = heads // EACH
    lines = wide + 2 * groups
    tile, line = tl.program_id(0) // lines, tl.program_id(0) % lines
    start, count = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1)
    first, source = tl.load(tiles + 3 * tile + 2), tl.load(sources + tile)
    at, channel = tl.arange(0, ROWS), line * STATE + tl.arange(0, STATE)
    kind: tl.constexpr = xs.dtype.element_ty
    made = _filtered(
        x, stride, weight, bias, inputs, source, lines * STATE, start, count, first, channel,
        BIASED, WIDTH, ROWS,
    ).to(kind)  # fmt: skip
    square = at[:, None] * STATE + tl.arange(0, STATE)[None, :]
    if line < wide:
        place = tile.to(tl.int64) * (heads * DIM * ROWS)
        own = channel // DIM * (ROWS * DIM) + channel % DIM
        tl.store(xs + place + at[:, None] * DIM + own[None, :], made)
        head, real = line * EACH + tl.arange(0, EACH), (at < count)[None, :]
        where = dt + (start + at).to(tl.int64)[None, :] * dt_stride + head[:, None]
        step = tl.load(where, mask=real, other=0.0).to(tl.float32)
        delta = tl.where(real, _softplus(step + tl.load(dt_bias + head)[:, None]), 0.0)
        decay = -tl.exp(tl.load(a_log + head))[:, None] * delta
        gates = (tile * heads + head).to(tl.int64)[:, None] * ROWS + at[None, :]
        tl.store(ds + gates, delta)
        tl.store(gs + gates, tl.cumsum(decay, axis=1))
    elif line < wide + groups:
        place = (tile * groups + line - wide).to(tl.int64) * (ROWS * STATE)
        tl.store(bs + place + square, made)
    else:
        place = (tile * groups + line - wide - groups).to(tl.int64) * (ROWS * STATE)
        tl.store(cs + place + square, made)


@triton.jit
def scan_tiles(
    bs, cs, ds, gs, ps, heads, groups, each,
    STATE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """What rows of a tile have of each other, ps [ROWS, ROWS], of `each` heads of a group a
    program."""
    _after_the_last()
    parts = heads // each
    tile, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    group, at = part * each // (heads // groups), tl.arange(0, ROWS)
    square = at[:, None] * STATE + tl.arange(0, STATE)[None, :]
    place = (tile * groups + group).to(tl.int64) * (ROWS * STATE)
    b, c = tl.load(bs + place + square), tl.load(cs + place + square)
    asked, lower = tl.dot(c, tl.trans(b)), at[:, None] >= tl.arange(0, ROWS)[None, :]
    shares = at[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    for turn in range(each):
        own = (tile * heads + part * each + turn).to(tl.int64)
        total, delta = tl.load(gs + own * ROWS + at), tl.load(ds + own * ROWS + at)
        faded = tl.exp(tl.where(lower, total[:, None] - total[None, :], float("-inf")))
        made = (asked * faded * delta[None, :]).to(ps.dtype.element_ty)
        tl.store(ps + own * (ROWS * ROWS) + shares, made)


@triton.jit
def scan_pass(
    x, stride, xs, bs, cs, ps, ds, gs, skip, inputs, matrices, out, out_stride,
    chains, sources, stops, slots, heads, groups,
    DIM: tl.constexpr, STATE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A head's state of a sequence a program; `chains` and `stops` are those of delta_pass."""
    _after_the_last()
    sequence, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    tile, row = tl.load(chains + 4 * sequence), tl.load(chains + 4 * sequence + 1)
    stop, last = tl.load(chains + 4 * sequence + 2), tl.load(chains + 4 * sequence + 3)
    source, group = tl.load(sources + sequence), head // (heads // groups)
    at, dim, wide = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, STATE)
    channels = heads * DIM + 2 * groups * STATE
    kind: tl.constexpr = xs.dtype.element_ty
    size, place = heads * DIM * STATE, (head * DIM + dim)[:, None] * STATE + wide[None, :]
    kept = tl.load(matrices + source * size + place, mask=source != NONE, other=0.0)
    state, skipped = kept.to(tl.float32), tl.load(skip + head)
    square = at[:, None] * STATE + wide[None, :]
    narrow = at[:, None] * DIM + dim[None, :]
    shares = at[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    while stop < last:
        until, ends = tl.load(stops + 2 * stop), tl.load(stops + 2 * stop + 1)
        slot = tl.load(slots + stop)
        for t in tl.range(tile, until, num_stages=STAGES):
            own, shared = (t * heads + head).to(tl.int64), (t * groups + group).to(tl.int64)
            c = tl.load(cs + shared * (ROWS * STATE) + square)
            value = tl.trans(tl.load(xs + own * (ROWS * DIM) + narrow))
            p = tl.load(ps + own * (ROWS * ROWS) + shares)
            b = tl.load(bs + shared * (ROWS * STATE) + square)
            delta, total = tl.load(ds + own * ROWS + at), tl.load(gs + own * ROWS + at)
            end = tl.load(gs + own * ROWS + ROWS - 1)
            made = tl.dot(state.to(kind), tl.trans(c)) * tl.exp(total)[None, :]
            made = tl.dot(value, tl.trans(p), made) + skipped * value.to(tl.float32)
            left = value.to(tl.float32) * (delta * tl.exp(end - total))[None, :]
            state = tl.dot(left.to(kind), b, state * tl.exp(end))
            lines = row + (t - tile) * ROWS + at
            where = out + lines.to(tl.int64)[None, :] * out_stride + (head * DIM + dim)[:, None]
            tl.store(where, made.to(out.dtype.element_ty), mask=(lines < ends)[None, :])
        if slot != NONE:
            tl.store(matrices + slot * size + place, state.to(matrices.dtype.element_ty))
            _copy(x, stride, inputs, slot, channels, ends, head * DIM + dim, WIDTH)
            if head == group * (heads // groups):
                of_b = heads * DIM + group * STATE + wide
                _copy(x, stride, inputs, slot, channels, ends, of_b, WIDTH)
                _copy(x, stride, inputs, slot, channels, ends, of_b + groups * STATE, WIDTH)
        row += (until - tile) * ROWS
        tile = until
        stop += 1
