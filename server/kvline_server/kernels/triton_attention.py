"""Triton kernels of decode attention over an fp8 KV cache; kernels/cubins.py compiles and launches
them.

`attend_fp8` reads each key and value once, for all queries of a key-value head, and turns them into
float16 in registers, which holds every number of e4m3. It reads two columns as one number of 16
bits, because tensor cores get their operands in no smaller ones without taking them apart; even and
odd columns then have GEMMs of their own. Where few sequences would leave the GPU idle their tokens
are split among programs, and `merge_splits` adds up what those made.
Reference: TorchKernels.attend; the tests compare the two. The sums that allow splitting a softmax:
FlashAttention (arXiv 2205.14135).
"""

import triton
import triton.language as tl

from kvline_server.kernels.triton_kernels import _after_the_last


@triton.jit
def _columns(pairs):
    """Of numbers of 16 bits the low and the high eight, two of e4m3, as float16."""
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b32 sorted;
            .reg .b16 low, high;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {low, high}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
        }
        """,
        "=r,=r,r",
        [pairs],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def attend_fp8(
    q,
    row_stride,
    keys,
    values,
    page_stride,
    token_stride,
    page_starts,
    pages,
    last_page,
    scale,
    out,
    parts,
    sums,
    queries,
    kv,
    splits,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """The queries of one row and key-value head, over one of `splits` parts of the tokens. `keys`
    and `values` are pairs of columns, their strides too. `scale` is that of query times key, times
    log2(e): powers are of two. SPLIT: float32 `parts` [rows, splits, queries, DIM], and in `sums`
    [rows, splits, queries, 2] the largest exponent, and the sum of powers relative to it."""
    _after_the_last()
    head = tl.program_id(0) % kv
    split = tl.program_id(0) // kv % splits
    row = tl.program_id(0) // kv // splits
    first = tl.load(page_starts + row)
    length = (tl.load(page_starts + row + 1) - first - 1) * PAGE + tl.load(last_page + row)
    each = (length + splits * TOKENS - 1) // (splits * TOKENS) * TOKENS
    start = split * each
    end = tl.minimum(start + each, length)
    turn = tl.arange(0, GROUP)
    there = turn < queries // kv
    mine = head * (queries // kv) + turn
    pair = tl.arange(0, DIM // 2)
    line = q + row.to(tl.int64) * row_stride + mine[:, None] * DIM + 2 * pair[None, :]
    even = (tl.load(line, mask=there[:, None], other=0.0).to(tl.float32) * scale).to(tl.float16)
    odd = (tl.load(line + 1, mask=there[:, None], other=0.0).to(tl.float32) * scale).to(tl.float16)
    most = tl.full((GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    left = tl.zeros((GROUP, DIM // 2), tl.float32)
    right = left
    for begin in range(start, end, TOKENS):
        token = begin + tl.arange(0, TOKENS)
        inside = token < end
        page = tl.load(pages + first + token // PAGE, mask=inside, other=0).to(tl.int64)
        place = page * page_stride + token % PAGE * token_stride + head * (DIM // 2)
        at = place[:, None] + pair[None, :]
        low, high = _columns(tl.load(keys + at, mask=inside[:, None], other=0))
        power = tl.dot(odd, tl.trans(high), tl.dot(even, tl.trans(low)))
        power = tl.where(inside[None, :], power, float("-inf"))
        now = tl.maximum(most, tl.max(power, axis=1))
        weight = tl.exp2(power - now[:, None])
        kept = tl.exp2(most - now)
        total = total * kept + tl.sum(weight, axis=1)
        low, high = _columns(tl.load(values + at, mask=inside[:, None], other=0))
        weight = weight.to(tl.float16)
        left = tl.dot(weight, low, left * kept[:, None])
        right = tl.dot(weight, high, right * kept[:, None])
        most = now
    made = tl.interleave(left, right)
    column = tl.arange(0, DIM)
    if SPLIT:
        into = (row.to(tl.int64) * splits + split) * queries + mine
        tl.store(parts + into[:, None] * DIM + column[None, :], made, mask=there[:, None])
        tl.store(sums + 2 * into, most, mask=there)
        tl.store(sums + 2 * into + 1, total, mask=there)
    else:
        into = row.to(tl.int64) * queries + mine
        made = (made / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + into[:, None] * DIM + column[None, :], made, mask=there[:, None])


@triton.jit
def merge_splits(parts, sums, out, queries, splits, DIM: tl.constexpr, SPLITS: tl.constexpr):
    """Of one query's splits: what they made, by the sums of their powers."""
    _after_the_last()
    row = (tl.program_id(0) // queries).to(tl.int64)
    query = tl.program_id(0) % queries
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, DIM)
    there = split < splits
    at = (row * splits + split) * queries + query
    most = tl.load(sums + 2 * at, mask=there, other=float("-inf"))
    weight = tl.exp2(most - tl.max(most, axis=0))
    total = tl.sum(weight * tl.load(sums + 2 * at + 1, mask=there, other=0.0), axis=0)
    each = tl.load(parts + at[:, None] * DIM + column[None, :], mask=there[:, None], other=0.0)
    made = tl.sum(each * weight[:, None], axis=0) / total
    tl.store(out + (row * queries + query) * DIM + column, made.to(out.dtype.element_ty))
