"""Triton kernels of linears with fp8 weights; kernels/cubins.py compiles and launches them.

`quantise` gives each row, or each 128 columns of a row, a scale, of an MLP after its activation.
`scaled` is a tile of the GEMM of fp8 inputs and weights, or of some of its terms where few tiles
would leave the GPU idle; `add_parts` adds those. `one_row_fp8` is `one_row` of triton_kernels.py
with such a weight: the input stays as it is, since reading the weights takes the time.
Reference: kernels/fp8.py; the tests compare the two.
"""

import triton
import triton.language as tl

from kvline_server.kernels.triton_kernels import _after_the_last


@triton.jit
def quantise(
    x,
    values,
    scales,
    inputs,
    stride,
    parts,
    BLOCKS: tl.constexpr,
    GATED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One of the `parts` of a row, WIDTH columns: with BLOCKS a scale of each 128 of them, which
    lies `stride` after the one before, else one of all, and the row is one part. GATED: a row of x
    has 2 * inputs columns, and silu of its first half times its second is what is quantised."""
    _after_the_last()
    row = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    at = part * WIDTH + tl.arange(0, WIDTH)
    inside = at < inputs
    base = row.to(tl.int64) * inputs
    line = x + base * (1 + GATED) + at
    a = tl.load(line, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        a *= tl.sigmoid(a) * tl.load(line + inputs, mask=inside, other=0.0).to(tl.float32)
        a = a.to(x.dtype.element_ty).to(tl.float32)  # as without fp8
    if BLOCKS:
        groups = tl.reshape(a, (WIDTH // 128, 128))
        scale = tl.maximum(tl.max(tl.abs(groups), axis=1), 1e-10) / 448.0
        made = tl.reshape(groups / scale[:, None], (WIDTH,))
        block = part * (WIDTH // 128) + tl.arange(0, WIDTH // 128)
        tl.store(scales + block * stride + row, scale, mask=block * 128 < inputs)
    else:
        scale = tl.maximum(tl.max(tl.abs(a), axis=0), 1e-10) / 448.0
        made = a / scale
        tl.store(scales + row, scale)
    tl.store(values + base + at, made.to(values.dtype.element_ty), mask=inside)


@triton.jit
def scaled(
    x,
    x_scales,
    x_stride,
    weight,
    scales,
    stride,
    out,
    rows,
    outputs,
    inputs,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """A tile of x W^T, or with SPLITS the terms of every so many blocks of inputs, in a part of
    `out` of its own. The weight is the left factor: its rows fill tensor cores, and x may be few.
    """
    _after_the_last()
    split = tl.program_id(0) % SPLITS
    tile = tl.program_id(0) // SPLITS
    tiles = (rows + ROWS - 1) // ROWS
    row = (tile % tiles) * ROWS + tl.arange(0, ROWS)
    first = (tile // tiles) * OUTPUTS
    column = first + tl.arange(0, OUTPUTS)
    left = weight + column[:, None].to(tl.int64) * inputs
    right = x + row[None, :].to(tl.int64) * inputs
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in range(0, inputs, 128 * SPLITS):
        block = start // 128 + split
        at = block * 128 + tl.arange(0, 128)
        inside = at < inputs
        w = tl.load(
            left + at[None, :], mask=(column < outputs)[:, None] & inside[None, :], other=0.0
        )
        a = tl.load(right + at[:, None], mask=(row < rows)[None, :] & inside[:, None], other=0.0)
        # Tensor cores add terms of fp8 with few bits: so 128 of them, and the sums in float32.
        terms = tl.dot(w, a, max_num_imprecise_acc=128)
        if BLOCKS:
            there = block * 128 < inputs
            of_x = tl.load(x_scales + block * x_stride + row, mask=(row < rows) & there, other=0.0)
            terms *= tl.load(scales + (first // 128) * stride + block, mask=there, other=0.0)
            terms *= of_x[None, :]
        total += terms
    if not BLOCKS:
        total *= tl.load(scales + column, mask=column < outputs, other=0.0)[:, None]
        total *= tl.load(x_scales + row, mask=row < rows, other=0.0)[None, :]
    part = out + split.to(tl.int64) * rows * outputs
    place = row[None, :].to(tl.int64) * outputs + column[:, None]
    whole = (row < rows)[None, :] & (column < outputs)[:, None]
    tl.store(part + place, total.to(out.dtype.element_ty), mask=whole)


@triton.jit
def add_parts(parts, out, elements, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Of SPLITS parts of so many elements, their sum."""
    _after_the_last()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts + split * elements.to(tl.int64) + at, mask=inside, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _terms(w, a, scales, inputs, BLOCKS: tl.constexpr):
    """Of each row of w, one of each 128 inputs, which leaves registers free; BLOCKS scale them."""
    blocks: tl.constexpr = w.shape[1] // 128
    each = tl.reshape(w.to(tl.float32) * a[None, :], (w.shape[0], blocks, 128))
    terms = tl.sum(each, axis=2)
    if BLOCKS:
        block = tl.arange(0, blocks)
        terms *= tl.load(scales + block, mask=block * 128 < inputs, other=0.0)[None, :]
    return terms


@triton.jit
def _of(scales, there, BLOCKS: tl.constexpr):
    """Those of rows; 1 where blocks have them."""
    return 1.0 if BLOCKS else tl.load(scales, mask=there, other=0.0)


@triton.jit
def one_row_fp8(
    x,
    norm,
    eps,
    weight,
    scales,
    stride,
    bias,
    out,
    outputs,
    inputs,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
):
    """As one_row. With BLOCKS its OUTPUTS rows have their scales in common."""
    _after_the_last()
    start_column = tl.program_id(0) * OUTPUTS
    column = start_column + tl.arange(0, OUTPUTS)
    there = column < outputs
    gates = weight + column[:, None].to(tl.int64) * inputs
    ups = gates + outputs.to(tl.int64) * inputs
    first = tl.zeros((OUTPUTS, INPUTS // 128), tl.float32)
    second = first
    squares = tl.zeros((INPUTS,), tl.float32)
    for start in tl.range(0, inputs, INPUTS, num_stages=3):
        at = start + tl.arange(0, INPUTS)
        inside = at < inputs
        whole = there[:, None] & inside[None, :]
        w = tl.load(gates + at[None, :], mask=whole, other=0.0)
        a = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            squares += a * a
            a *= tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
        line = scales + start_column // 128 * stride + start // 128
        first += _terms(w, a, line, inputs - start, BLOCKS)
        if GATED:
            w = tl.load(ups + at[None, :], mask=whole, other=0.0)
            line += outputs // 128 * stride
            second += _terms(w, a, line, inputs - start, BLOCKS)
    scale = tl.rsqrt(tl.sum(squares, axis=0) / inputs + eps) if NORM else 1.0
    made = tl.sum(first, axis=1) * scale * _of(scales + column, there, BLOCKS)
    if BIAS:
        made += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(second, axis=1) * scale * _of(scales + outputs + column, there, BLOCKS)
        made *= tl.sigmoid(made) * up
    if ADD:
        made += tl.load(out + column, mask=there, other=0.0).to(tl.float32)
    tl.store(out + column, made.to(out.dtype.element_ty), mask=there)
