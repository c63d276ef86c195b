"""Triton kernel of experts whose weights stay in MXFP4; kernels/cubins.py compiles and launches it.

A weight is read in units of 128 numbers of a row, packed (cuda_mxfp4.pack) so that a word of 16
bits has a number of each of a unit's four scales: what becomes of the words are four parts of a
bfloat16 row, in registers, which tensor cores read from there. Reference: Mxfp4Weight.dequantised.
"""

import triton
import triton.language as tl

from kvline_server.kernels.triton_experts import _lines, _places, _store, _tile
from kvline_server.kernels.triton_kernels import _after_the_last

UNIT = tl.constexpr(128)  # numbers of a row, with four scales
WORDS = tl.constexpr(32)  # of 16 bits in a unit
GROUP = tl.constexpr(32)  # rows whose words of a unit are one after the other
LIMIT = tl.constexpr(7.0)  # of gate and up, before swiglu_oai
ALPHA = tl.constexpr(1.702)

# Two words become four pairs of numbers: the bits of E2M1 at those of bfloat16's sign, the last two
# of its exponent and the first of its fraction, times a scale that makes up for the exponent. The
# first three of a word are there by a shift, the fourth has three parts.
UNPACK = tl.constexpr("""
{
.reg .b32 t, u;
and.b32 t, $4, 0x81C081C0;
mul.rn.bf16x2 $0, t, $5;
shl.b32 t, $4, 3;
and.b32 t, t, 0x81C081C0;
mul.rn.bf16x2 $1, t, $7;
shl.b32 t, $4, 6;
and.b32 t, t, 0x81C081C0;
mul.rn.bf16x2 $2, t, $9;
shl.b32 t, $4, 1;
and.b32 t, t, 0x80008000;
shr.b32 u, $4, 3;
lop3.b32 t, u, 0x01800180, t, 0xEA;
shr.b32 u, $4, 7;
lop3.b32 t, u, 0x00400040, t, 0xEA;
mul.rn.bf16x2 $3, t, $11;
}
""")
UNPACKED = tl.constexpr("=r,=r,=r,=r," + ",".join(["r"] * 9))
# A byte of four becomes the exponent of two numbers in bfloat16.
SCALE_0 = tl.constexpr("{.reg .b32 t; prmt.b32 t, $1, 0, 0x4040; shl.b32 $0, t, 7;}")
SCALE_1 = tl.constexpr("{.reg .b32 t; prmt.b32 t, $1, 0, 0x4141; shl.b32 $0, t, 7;}")
SCALE_2 = tl.constexpr("{.reg .b32 t; prmt.b32 t, $1, 0, 0x4242; shl.b32 $0, t, 7;}")
SCALE_3 = tl.constexpr("{.reg .b32 t; prmt.b32 t, $1, 0, 0x4343; shl.b32 $0, t, 7;}")


@triton.jit
def _scale(scales, PTX: tl.constexpr):
    made = tl.inline_asm_elementwise(PTX, "=r,r", [scales], dtype=tl.int32, is_pure=True, pack=1)
    return made[:, None]


@triton.jit
def _number(bits, scales, PART: tl.constexpr):
    """What UNPACK does to one part of the words, without PTX."""
    scale = ((scales >> (8 * PART)) & 255) << 23
    return (bits << 16).to(tl.float32, bitcast=True) * scale.to(tl.float32, bitcast=True)[:, None]


@triton.jit
def _unpacked(words, scales, PTX: tl.constexpr, DTYPE: tl.constexpr):
    """Words int16 [OUTPUTS, WORDS], scales int32 [OUTPUTS] -> DTYPE [OUTPUTS, UNIT]"""
    if PTX:
        s0, s1 = _scale(scales, SCALE_0), _scale(scales, SCALE_1)
        s2, s3 = _scale(scales, SCALE_2), _scale(scales, SCALE_3)
        part0, part1, part2, part3 = tl.inline_asm_elementwise(
            UNPACK,
            UNPACKED,
            [words, s0, s1, s2, s3],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        w = words.to(tl.int32) & 0xFFFF
        fourth = ((w << 1) & 0x8000) | ((w >> 3) & 0x0180) | ((w >> 7) & 0x0040)
        part0 = _number(w & 0x81C0, scales, 0).to(DTYPE)
        part1 = _number((w << 3) & 0x81C0, scales, 1).to(DTYPE)
        part2 = _number((w << 6) & 0x81C0, scales, 2).to(DTYPE)
        part3 = _number(fourth, scales, 3).to(DTYPE)
    # One after the other in a row, which moves nothing between threads.
    parts = tl.join(tl.join(part0, part1), tl.join(part2, part3))
    return tl.permute(parts, (0, 3, 2, 1)).reshape(words.shape[0], UNIT)


@triton.jit
def _finished(total, bias, line, outputs, GATED: tl.constexpr, BIASED: tl.constexpr):
    """What follows the GEMM: biases, and swiglu_oai of gate and up, which are `total`'s halves."""
    if GATED:
        halves = total.reshape(2, total.shape[0] // 2, total.shape[1])
        total, up = tl.split(tl.permute(halves, (1, 2, 0)))
    if BIASED:
        total += tl.load(bias + line).to(tl.float32)[:, None]
        if GATED:
            up += tl.load(bias + line + outputs).to(tl.float32)[:, None]
    if GATED:
        # A NaN stays one: it ends its request.
        total = tl.minimum(total, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        total *= tl.sigmoid(ALPHA * total) * (up + 1.0)
    return total


@triton.jit
def _rows(
    x,
    order,
    weight,
    scales,
    bias,
    expert,
    first,
    end,
    bound,
    out,
    outputs,
    inputs,
    units,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PTX: tl.constexpr,
):
    """A program of `grouped_mxfp4` whose tile has up to ROWS pairs. With gate, its rows of the
    weight are those of gate and then those of up: one GEMM, for which a warp has more to unpack
    while its tensor cores are at work."""
    every: tl.constexpr = 2 * OUTPUTS
    place, row = _places(order, first, end, GATED, ROWS)
    column, line = _lines(expert, bound, outputs, GATED, every // (1 + GATED))
    at = tl.arange(0, UNIT)
    right = x + row[None, :].to(tl.int64) * inputs + at[:, None]
    wide = line
    if GATED:
        wide = tl.join(line, line + outputs).permute(1, 0).reshape(every)
    group = wide // GROUP * units
    left = weight + ((group * GROUP + wide % GROUP) * WORDS)[:, None] + tl.arange(0, WORDS)[None, :]
    lefts = scales + group * GROUP + wide % GROUP
    total = tl.zeros((every, ROWS), tl.float32)
    for unit in range(units):
        a = tl.load(right + unit * UNIT, mask=(at < inputs - unit * UNIT)[:, None], other=0.0)
        words = tl.load(left + unit * (GROUP * WORDS))
        w = _unpacked(words, tl.load(lefts + unit * GROUP), PTX, x.dtype.element_ty)
        total = tl.dot(w, a, total)
    total = _finished(total, bias, line, outputs, GATED, BIASED)
    _store(out, place, end, column, outputs, total)


@triton.jit
def grouped_mxfp4(
    x,
    order,
    weight,
    scales,
    bias,
    tiles,
    bound,
    out,
    outputs,
    inputs,
    units,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PTX: tl.constexpr,
):
    """As triton_experts.grouped, of a weight of `units` units a row, with a bias of each output.
    GATED: swiglu_oai of W's first half and its second. A tile of few pairs takes as few columns of
    the tensor cores: most experts' last one, and with few rows in a step every one."""
    _after_the_last()
    expert, first, end = _tile(tiles, bound)
    if first >= end:
        return
    how = (x, order, weight, scales, bias, expert, first, end, bound, out, outputs, inputs, units)
    if ROWS > 16 and end - first <= 16:
        _rows(*how, GATED, BIASED, 16, OUTPUTS, PTX)
    elif ROWS > 32 and end - first <= 32:
        _rows(*how, GATED, BIASED, 32, OUTPUTS, PTX)
    elif ROWS > 64 and end - first <= 64:
        _rows(*how, GATED, BIASED, 64, OUTPUTS, PTX)
    else:
        _rows(*how, GATED, BIASED, ROWS, OUTPUTS, PTX)
