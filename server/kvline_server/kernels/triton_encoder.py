"""Triton code of encoders of images: what is between their GEMMs and attention.

kernels/cubins.py compiles and launches the kernels. Reference: kernels/torch_encoder.py. Heads of
72 or 80 elements are padded to 128 with zeros, as attention takes no others.
"""

import triton
import triton.language as tl


@triton.jit
def pad_heads(
    qkv, cos, sin, out, heads, eighths,
    TURN: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK elements of the padded queries, keys or values of a row a program. A head has 8 *
    `eighths` elements, of which those of queries and keys are rotated in float32: cos and sin
    [rows, half]. out [rows, 3, heads, PADDED]"""
    parts = tl.cdiv(heads * PADDED, BLOCK)
    third, row = tl.program_id(0) // parts % 3, (tl.program_id(0) // parts // 3).to(tl.int64)
    at = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    head, element, half = at // PADDED, at % PADDED, eighths * 4
    dim = eighths * 8
    real = (head < heads) & (element < dim)
    own = qkv + (row * 3 + third) * (heads * dim) + head * dim
    made = tl.load(own + element, mask=real, other=0.0).to(tl.float32)
    if TURN:  # noqa: SIM102 - one is known to the compiler, the other to a program
        if third < 2:
            low = element < half
            where = tl.where(low, element + half, element - half)
            other = tl.load(own + where, mask=real, other=0.0).to(tl.float32)
            angle = row * half + tl.where(low, element, element - half)
            made *= tl.load(cos + angle, mask=real, other=0.0)
            made += tl.where(low, -other, other) * tl.load(sin + angle, mask=real, other=0.0)
    place = out + (row * 3 + third) * (heads * PADDED) + at
    tl.store(place, made.to(out.dtype.element_ty), mask=head < heads)


@triton.jit
def unpad_heads(x, out, heads, eighths, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK padded elements of a row a program. x [rows, heads, PADDED], out [rows, heads * dim]"""
    parts = tl.cdiv(heads * PADDED, BLOCK)
    row = (tl.program_id(0) // parts).to(tl.int64)
    at = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    head, element, dim = at // PADDED, at % PADDED, eighths * 8
    real = (head < heads) & (element < dim)
    made = tl.load(x + row * (heads * PADDED) + at, mask=real, other=0.0)
    tl.store(out + row * (heads * dim) + head * dim + element, made, mask=real)


@triton.jit
def add_then_norm(
    x, added, weight, bias, out, width, eps,
    ADDED: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row a program. With ADDED x += added, as rounded; out is x's layer norm, or where it is not
    CENTRED its RMS norm, which reads no bias. All contiguous, [rows, width]"""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    real, place = at < width, row * width + at
    value = tl.load(x + place, mask=real, other=0.0).to(tl.float32)
    if ADDED:
        value += tl.load(added + place, mask=real, other=0.0).to(tl.float32)
        rounded = value.to(x.dtype.element_ty)
        tl.store(x + place, rounded, mask=real)
        value = rounded.to(tl.float32)
    if CENTRED:
        value = tl.where(real, value - tl.sum(value, axis=0) / width, 0.0)
    scale = tl.load(weight + at, mask=real, other=0.0).to(tl.float32)
    made = value * tl.rsqrt(tl.sum(value * value, axis=0) / width + eps) * scale
    if CENTRED:
        made += tl.load(bias + at, mask=real, other=0.0).to(tl.float32)
    tl.store(out + place, made.to(out.dtype.element_ty), mask=real)
