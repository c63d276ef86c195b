"""Triton code that recurrent layers share: the convolution, the gates, the norms behind them.

kernels/cubins.py compiles and launches the kernels. Reference: kernels/torch_recurrent.py. A slot of
DUMMY (recurrent.py) is neither read nor written here: a sequence that starts from zero loads
nothing, so NaN in a freed slot is never multiplied by anything.
"""

import triton
import triton.language as tl

from kvline_server.kernels.triton_kernels import _after_the_last

NONE = tl.constexpr(0)  # recurrent.DUMMY


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _softplus(x):
    """log(1 + e^x). The hardware's logarithm has an absolute error: of small arguments the series."""
    e = tl.exp(tl.minimum(x, 20.0))
    series = e * (1.0 - e * (0.5 - e * (0.33333333 - e * (0.25 - e * 0.2))))
    return tl.where(x > 20.0, x, tl.where(e < 0.0625, series, tl.log(1.0 + e)))


@triton.jit
def _tap(weight, channel, lag: tl.constexpr, WIDTH: tl.constexpr):
    """What a row `lag` rows before is multiplied by. -> float32, as channel"""
    return tl.load(weight + channel * WIDTH + (WIDTH - 1 - lag)).to(tl.float32)


@triton.jit
def _line(x, stride, inputs, source, channels, row, first, channel, WIDTH: tl.constexpr):
    """The convolution's input of one row of a sequence that begins at row `first`: what is before
    it is in its source, the newest last. -> float32, as channel"""
    here, kept = row >= first, (row < first) & (source != NONE)
    old = inputs + (source * (WIDTH - 1) + (WIDTH - 1) + (row - first)) * channels
    made = tl.load(x + row.to(tl.int64) * stride + channel, mask=here, other=0.0).to(tl.float32)
    return made + tl.load(old + channel, mask=kept, other=0.0).to(tl.float32)


@triton.jit
def _filtered_row(
    x, stride, weight, bias, inputs, source, channels, row, first, channel,
    BIASED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """silu of the convolution of one row. -> float32, as channel"""
    made = tl.zeros(channel.shape, tl.float32)
    if BIASED:
        made += tl.load(bias + channel).to(tl.float32)
    for lag in tl.static_range(WIDTH):
        value = _line(x, stride, inputs, source, channels, row - lag, first, channel, WIDTH)
        made += value * _tap(weight, channel, lag, WIDTH)
    return _silu(made)


@triton.jit
def _filtered(
    x, stride, weight, bias, inputs, source, channels, start, count, first, channel,
    BIASED: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """silu of the convolution of `count` rows from `start` on, of a sequence that begins at row
    `first`; 0 behind them. -> float32 [ROWS, channels]"""
    at = tl.arange(0, ROWS)
    real = at < count
    made = tl.zeros((ROWS, channel.shape[0]), tl.float32)
    if BIASED:
        made += tl.load(bias + channel).to(tl.float32)[None, :]
    for lag in tl.static_range(WIDTH):
        row = start + at - lag
        where = x + row.to(tl.int64)[:, None] * stride + channel[None, :]
        value = tl.load(where, mask=(real & (row >= first))[:, None], other=0.0).to(tl.float32)
        if lag > 0:
            if (start - lag < first) & (source != NONE):
                old = (source * (WIDTH - 1) + (WIDTH - 1) + (row - first)) * channels
                early = (real & (row < first))[:, None]
                kept = tl.load(inputs + old[:, None] + channel[None, :], mask=early, other=0.0)
                value += kept.to(tl.float32)
        made += value * _tap(weight, channel, lag, WIDTH)[None, :]
    return tl.where(real[:, None], _silu(made), 0.0)


@triton.jit
def _shift(
    x, stride, inputs, source, slot, channels, first, end, channel, WIDTH: tl.constexpr
):  # fmt: skip
    """The inputs that a sequence leaves in its slot. They are read before any is written: with few
    rows they are some of those that the slot has."""
    new2 = _line(x, stride, inputs, source, channels, end - 1, first, channel, WIDTH)
    new1 = _line(x, stride, inputs, source, channels, end - 2, first, channel, WIDTH)
    new0 = _line(x, stride, inputs, source, channels, end - 3, first, channel, WIDTH)
    tl.debug_barrier()
    own = inputs + slot * (WIDTH - 1) * channels + channel
    kind = inputs.dtype.element_ty
    tl.store(own, new0.to(kind))
    tl.store(own + channels, new1.to(kind))
    tl.store(own + 2 * channels, new2.to(kind))


@triton.jit
def _copy(x, stride, inputs, slot, channels, ends, channel, WIDTH: tl.constexpr):
    """The inputs that a sequence leaves before row `ends`, which are all of this step."""
    for lag in tl.static_range(1, WIDTH):
        value = tl.load(x + (ends - lag).to(tl.int64) * stride + channel)
        own = inputs + (slot * (WIDTH - 1) + (WIDTH - 1 - lag)) * channels
        tl.store(own + channel, value.to(inputs.dtype.element_ty))


@triton.jit
def norm_then_gate(
    x, gate, gate_stride, weight, out, parts, eps,
    SIGMOID: tl.constexpr, DIM: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """EACH heads of a row a program, of which a row has `parts`; x and out contiguous."""
    _after_the_last()
    row, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    at = part * (EACH * DIM) + tl.arange(0, EACH)[:, None] * DIM + tl.arange(0, DIM)[None, :]
    place = row.to(tl.int64) * (parts * EACH * DIM)
    value = tl.load(x + place + at).to(tl.float32)
    gates = tl.load(gate + row.to(tl.int64) * gate_stride + at).to(tl.float32)
    scale = tl.load(weight + tl.arange(0, DIM)).to(tl.float32)
    made = value * tl.rsqrt(tl.sum(value * value, axis=1) / DIM + eps)[:, None] * scale[None, :]
    made *= _sigmoid(gates) if SIGMOID else _silu(gates)
    tl.store(out + place + at, made.to(out.dtype.element_ty))


@triton.jit
def gate_then_norm(
    x, gate, gate_stride, weight, out, groups, width, eps, BLOCK: tl.constexpr
):  # fmt: skip
    """A group of `width` columns of a row a program; x and out contiguous."""
    _after_the_last()
    row, group = (tl.program_id(0) // groups).to(tl.int64), tl.program_id(0) % groups
    at = tl.arange(0, BLOCK)
    real, column = at < width, group * width + at
    place = row * (groups * width) + column
    value = tl.load(x + place, mask=real, other=0.0).to(tl.float32)
    gates = tl.load(gate + row * gate_stride + column, mask=real, other=0.0).to(tl.float32)
    value *= _silu(gates)
    scale = tl.load(weight + column, mask=real, other=0.0).to(tl.float32)
    made = value * tl.rsqrt(tl.sum(value * value, axis=0) / width + eps) * scale
    tl.store(out + place, made.to(out.dtype.element_ty), mask=real)
