"""Triton code that recurrent layers share: the convolution, the gates, the norms behind them.

kernels/cubins.py compiles and launches the kernels. Reference: kernels/torch_recurrent.py. The slot
DUMMY (recurrent.py) is neither read nor written: a sequence that starts from zero loads nothing, so
NaN in a freed slot is never multiplied by anything.
"""

import triton
import triton.language as tl

from kvline_server.kernels.triton_kernels import _after_the_last

NONE = tl.constexpr(0)  # recurrent.DUMMY
EPSILON = tl.constexpr(1e-6)  # of the length of queries and keys


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _softplus(x):
    """log(1 + e^x). The hardware's logarithm has an absolute error: of small e^x the series."""
    e = tl.exp(tl.minimum(x, 20.0))
    series = e * (1.0 - e * (0.5 - e * (0.33333333 - e * (0.25 - e * 0.2))))
    return tl.where(x > 20.0, x, tl.where(e < 0.0625, series, tl.log(1.0 + e)))


@triton.jit
def _taps(weight, channel, WIDTH: tl.constexpr):
    """What a channel's rows are multiplied by, the oldest first: WIDTH of 4. Loaded one by one they
    take more instructions than the rows. -> four times float32, as channel"""
    if weight.dtype.element_ty.primitive_bitwidth == 16:
        words = tl.load(weight.to(tl.pointer_type(tl.int64)) + channel)
        w0, w1 = _half(weight, words), _half(weight, words >> 16)
        return w0, w1, _half(weight, words >> 32), _half(weight, words >> 48)
    own = weight + channel * WIDTH
    w0, w1 = tl.load(own).to(tl.float32), tl.load(own + 1).to(tl.float32)
    return w0, w1, tl.load(own + 2).to(tl.float32), tl.load(own + 3).to(tl.float32)


@triton.jit
def _half(weight, words):
    return words.to(tl.int16).to(weight.dtype.element_ty, bitcast=True).to(tl.float32)


@triton.jit
def _ahead(x, stride, row, channel, real):
    """Rows of x, 0 where they are not real. -> float32 [rows, channels]"""
    where = x + row.to(tl.int64)[:, None] * stride + channel[None, :]
    return tl.load(where, mask=real[:, None], other=0.0).to(tl.float32)


@triton.jit
def _behind(inputs, source, channels, row, first, channel, real, WIDTH: tl.constexpr):
    """Rows before the sequence's first one, from its source. -> float32 [rows, channels]"""
    old = (source * (WIDTH - 1) + (WIDTH - 1) + (row - first)) * channels
    mask = (real & (row < first))[:, None]
    return tl.load(inputs + old[:, None] + channel[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _filtered(
    x, stride, weight, bias, inputs, source, channels, start, count, first, channel,
    BIASED: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """silu of the convolution of `count` rows from `start` on, of a sequence that begins at row
    `first`; 0 behind them. -> float32 [ROWS, channels]"""
    at = tl.arange(0, ROWS)
    row, real = start + at, at < count
    w0, w1, w2, w3 = _taps(weight, channel, WIDTH)
    made = w0[None, :] * _ahead(x, stride, row - 3, channel, real & (row - 3 >= first))
    made += w1[None, :] * _ahead(x, stride, row - 2, channel, real & (row - 2 >= first))
    made += w2[None, :] * _ahead(x, stride, row - 1, channel, real & (row - 1 >= first))
    made += w3[None, :] * _ahead(x, stride, row, channel, real)
    if (start - first < WIDTH - 1) & (source != NONE):
        old = _behind(inputs, source, channels, row - 3, first, channel, real, WIDTH)
        made += w0[None, :] * old
        old = _behind(inputs, source, channels, row - 2, first, channel, real, WIDTH)
        made += w1[None, :] * old
        old = _behind(inputs, source, channels, row - 1, first, channel, real, WIDTH)
        made += w2[None, :] * old
    if BIASED:
        made += tl.load(bias + channel).to(tl.float32)[None, :]
    return tl.where(real[:, None], _silu(made), 0.0)


@triton.jit
def _kept(inputs, source, channels, channel, read, WIDTH: tl.constexpr):
    """What a source has of channels, the oldest first. -> three times float32, as channel"""
    own = inputs + source * (WIDTH - 1) * channels + channel
    old0 = tl.load(own, mask=read, other=0.0).to(tl.float32)
    old1 = tl.load(own + channels, mask=read, other=0.0).to(tl.float32)
    return old0, old1, tl.load(own + 2 * channels, mask=read, other=0.0).to(tl.float32)


@triton.jit
def _keep(inputs, slot, channels, channel, old0, old1, old2, WIDTH: tl.constexpr):
    own = inputs + slot * (WIDTH - 1) * channels + channel
    tl.store(own, old0.to(inputs.dtype.element_ty))
    tl.store(own + channels, old1.to(inputs.dtype.element_ty))
    tl.store(own + 2 * channels, old2.to(inputs.dtype.element_ty))


@triton.jit
def convolve_rows(
    x, stride, weight, bias, inputs, out, spans, slots, sources, all_lines, lines, queries, keys,
    DIM: tl.constexpr, LINES: tl.constexpr, WIDTH: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """The convolution of few rows of a sequence, LINES of DIM channels a program, in float32, and
    what they leave in the slot: the first `lines` of DIM channels. Of them the first are `queries`,
    then `keys`, of length 1; queries over the root of DIM. out [rows, lines * DIM]"""
    _after_the_last()
    parts = lines // LINES
    sequence, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    slot, source = tl.load(slots + sequence), tl.load(sources + sequence)
    first, end = tl.load(spans + 2 * sequence), tl.load(spans + 2 * sequence + 1)
    if slot == NONE:  # padding
        return
    line, channels = part * LINES + tl.arange(0, LINES)[:, None], all_lines * DIM
    channel = line * DIM + tl.arange(0, DIM)[None, :]
    w0, w1, w2, w3 = _taps(weight, channel, WIDTH)
    old0, old1, old2 = _kept(inputs, source, channels, channel, source != NONE, WIDTH)
    for turn in range(end - first):
        row = (first + turn).to(tl.int64)
        new = tl.load(x + row * stride + channel).to(tl.float32)
        made = w0 * old0 + w1 * old1 + w2 * old2 + w3 * new
        if BIASED:
            made += tl.load(bias + channel).to(tl.float32)
        made = _silu(made)
        unit = tl.rsqrt(tl.sum(made * made, axis=1) + EPSILON)[:, None]
        scale = tl.where(line < queries, unit / tl.sqrt(DIM * 1.0), unit)
        made *= tl.where(line < queries + keys, scale, 1.0)
        tl.store(out + row * (lines * DIM) + channel, made)
        old0, old1, old2 = old1, old2, new
    _keep(inputs, slot, channels, channel, old0, old1, old2, WIDTH)


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
