"""Triton kernels of Mamba2's scan; kernels/cubins.py compiles and launches them.

As those of the delta rule (triton_delta_rule.py): `scan_rows` computes few rows of a sequence one
after the other, `scan_tiles` all tiles of longer ones at once as far as no state is needed,
`scan_pass` takes each sequence's state through them. Reference: kernels/torch_chunks.py.
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
def scan_tiles(
    x, stride, dt, dt_stride, weight, bias, a_log, dt_bias, inputs, tiles, sources,
    xs, bs, cs, ps, ds, gs, heads, groups,
    DIM: tl.constexpr, STATE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    BIASED: tl.constexpr,
):  # fmt: skip
    """A tile of rows of a group or a head a program. Of each tile and group it leaves B and C
    [ROWS, STATE] and what they have of each other, ps [ROWS, ROWS]; of each tile and head x,
    transposed, [DIM, ROWS], delta and the sum of decays' logarithms, ds and gs [ROWS]."""
    _after_the_last()
    tile, one = tl.program_id(0) // (heads + groups), tl.program_id(0) % (heads + groups)
    start, count = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1)
    first, source = tl.load(tiles + 3 * tile + 2), tl.load(sources + tile)
    at, channels = tl.arange(0, ROWS), heads * DIM + 2 * groups * STATE
    kind: tl.constexpr = xs.dtype.element_ty
    if one < groups:
        of_b = heads * DIM + one * STATE + tl.arange(0, STATE)
        b = _filtered(
            x, stride, weight, bias, inputs, source, channels, start, count, first, of_b,
            BIASED, WIDTH, ROWS,
        ).to(kind)  # fmt: skip
        c = _filtered(
            x, stride, weight, bias, inputs, source, channels, start, count, first,
            of_b + groups * STATE, BIASED, WIDTH, ROWS,
        ).to(kind)  # fmt: skip
        index = (tile * groups + one).to(tl.int64)
        square = at[:, None] * STATE + tl.arange(0, STATE)[None, :]
        tl.store(bs + index * (ROWS * STATE) + square, b)
        tl.store(cs + index * (ROWS * STATE) + square, c)
        shares = at[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        tl.store(ps + index * (ROWS * ROWS) + shares, tl.dot(c, tl.trans(b)).to(kind))
    else:
        head, dim = one - groups, tl.arange(0, DIM)
        value = _filtered(
            x, stride, weight, bias, inputs, source, channels, start, count, first,
            head * DIM + dim, BIASED, WIDTH, ROWS,
        ).to(kind)  # fmt: skip
        index, real = (tile * heads + head).to(tl.int64), at < count
        turned = dim[:, None] * ROWS + at[None, :]
        tl.store(xs + index * (ROWS * DIM) + turned, tl.trans(value))
        step = tl.load(dt + (start + at).to(tl.int64) * dt_stride + head, mask=real, other=0.0)
        delta = tl.where(real, _softplus(step.to(tl.float32) + tl.load(dt_bias + head)), 0.0)
        tl.store(ds + index * ROWS + at, delta)
        decay = -tl.exp(tl.load(a_log + head)) * delta
        tl.store(gs + index * ROWS + at, tl.cumsum(decay, axis=0))


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
    turned = dim[:, None] * ROWS + at[None, :]
    shares = at[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    lower = at[:, None] >= tl.arange(0, ROWS)[None, :]
    while stop < last:
        until, ends = tl.load(stops + 2 * stop), tl.load(stops + 2 * stop + 1)
        slot = tl.load(slots + stop)
        for t in tl.range(tile, until, num_stages=STAGES):
            own, shared = (t * heads + head).to(tl.int64), (t * groups + group).to(tl.int64)
            c = tl.load(cs + shared * (ROWS * STATE) + square)
            value = tl.load(xs + own * (ROWS * DIM) + turned)
            p = tl.load(ps + shared * (ROWS * ROWS) + shares)
            b = tl.load(bs + shared * (ROWS * STATE) + square)
            delta, total = tl.load(ds + own * ROWS + at), tl.load(gs + own * ROWS + at)
            end = tl.load(gs + own * ROWS + ROWS - 1)
            made = tl.dot(state.to(kind), tl.trans(c)) * tl.exp(total)[None, :]
            faded = tl.exp(tl.where(lower, total[:, None] - total[None, :], float("-inf")))
            value = value.to(tl.float32)
            added = value * delta[None, :]
            left = (added * tl.exp(end - total)[None, :]).to(kind)
            state = tl.dot(left, b, state * tl.exp(end))
            made = tl.dot(added.to(kind), tl.trans((p.to(tl.float32) * faded).to(kind)), made)
            made += skipped * value
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
