"""Triton kernels of attention over an fp8 KV cache, and of sinks over any; kernels/cubins.py
compiles and launches them.

`attend_fp8` reads each key and value once, for all queries of a key-value head, and turns them into
float16 in registers, which holds every number of e4m3. It reads two columns as one number of 16
bits, because tensor cores get their operands in no smaller ones without taking them apart; even and
odd columns then have GEMMs of their own. Where few sequences would leave the GPU idle their tokens
are split among programs (split-KV), and `merge_splits` adds up what those made. A sliding window is
the last tokens of a sequence. `copy_pages` is for prompt chunks, which read a copy in bfloat16.
A sink is a term more in the sum of a head's softmax; `apply_sinks` adds it to what FlashInfer made.
Reference: TorchAttention; the tests compare the two. The sums that allow splitting a softmax:
FlashAttention (arXiv 2205.14135).
"""

import triton
import triton.language as tl

from kvline_server.kernels.triton_kernels import _after_the_last

LOG2E = tl.constexpr(1.4426950408889634)


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
def _tokens(
    page_starts,
    last_page,
    kv,
    window,
    splits,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Of a program its head, row and split, where the row's pages begin in the table, the first
    token that is seen, and the split's tokens: a part of those pages that have such."""
    head, split = tl.program_id(0) % kv, tl.program_id(0) // kv % splits
    row = tl.program_id(0) // kv // splits
    first = tl.load(page_starts + row)
    length = (tl.load(page_starts + row + 1) - first - 1) * PAGE + tl.load(last_page + row)
    seen = tl.maximum(length - window, 0) if WINDOWED else 0
    start = seen // PAGE * PAGE
    each = (length - start + splits * TOKENS - 1) // (splits * TOKENS) * TOKENS
    begin, end = start + split * each, tl.minimum(start + (split + 1) * each, length)
    return head, row, split, first, seen, begin, end


@triton.jit
def _query(columns, there, log2_scale):
    x = tl.load(columns, mask=there[:, None], other=0.0).to(tl.float32)
    return (x * log2_scale).to(tl.float16)


@triton.jit
def _read(part, places, inside):
    return _columns(tl.load(part + places, mask=inside[:, None], other=0))


@triton.jit
def _scores(even, odd, keys, places, inside, visible):
    low, high = _read(keys, places, inside)
    scores = tl.dot(odd, tl.trans(high), tl.dot(even, tl.trans(low)))
    return tl.where(visible[None, :], scores, float("-inf"))


@triton.jit
def _summed(scores, most, total):
    """The highest score and the sum with these, their weights, and what earlier ones become by."""
    now = tl.maximum(most, tl.max(scores, axis=1))
    weight, rescale = tl.exp2(scores - now[:, None]), tl.exp2(most - now)
    return now, total * rescale + tl.sum(weight, axis=1), weight, rescale


@triton.jit
def _with_values(left, right, rescale, weight, values, places, inside):
    low, high = _read(values, places, inside)
    left = tl.dot(weight.to(tl.float16), low, left * rescale[:, None])
    return left, tl.dot(weight.to(tl.float16), high, right * rescale[:, None])


@triton.jit
def _sink(sinks, there, most):
    """What a sink adds to a sum of exponentials that are relative to `most`, a log2."""
    return tl.exp2(tl.load(sinks, mask=there, other=0.0) * LOG2E - most)


@triton.jit
def attend_fp8(
    q,
    row_stride,
    keys,
    values,
    page_stride,
    page_starts,
    pages,
    last_page,
    log2_scale,
    out,
    max_and_sum,
    sinks,
    queries,
    kv,
    window,
    splits,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """The queries of one row and key-value head over one split of the tokens. `keys` and `values`
    are pairs of columns; `log2_scale` is the softmax scale times log2(e). `out` [rows, queries,
    DIM]; SPLIT: [rows, splits, queries, DIM], and `max_and_sum` [..., 2] of its softmax. WINDOWED:
    of the last `window` tokens, of which each block has some. SINKS [queries]: not with SPLIT."""
    _after_the_last()
    head, row, split, first, seen, start, end = _tokens(
        page_starts, last_page, kv, window, splits, PAGE, TOKENS, WINDOWED
    )
    there = tl.arange(0, GROUP) < queries // kv
    mine = head * (queries // kv) + tl.arange(0, GROUP)
    pair = tl.arange(0, DIM // 2)
    columns = q + row.to(tl.int64) * row_stride + mine[:, None] * DIM + 2 * pair[None, :]
    even, odd = _query(columns, there, log2_scale), _query(columns + 1, there, log2_scale)
    most, total = tl.full((GROUP,), float("-inf"), tl.float32), tl.zeros((GROUP,), tl.float32)
    left, right = tl.zeros((GROUP, DIM // 2), tl.float32), tl.zeros((GROUP, DIM // 2), tl.float32)
    for begin in range(start, end, TOKENS):
        token = begin + tl.arange(0, TOKENS)
        inside = token < end
        page = tl.load(pages + first + token // PAGE, mask=inside, other=0).to(tl.int64)
        line = page * page_stride + (token % PAGE * kv + head) * (DIM // 2)
        places = line[:, None] + pair[None, :]
        visible = inside & (token >= seen) if WINDOWED else inside
        scores = _scores(even, odd, keys, places, inside, visible)
        most, total, weight, rescale = _summed(scores, most, total)
        left, right = _with_values(left, right, rescale, weight, values, places, inside)
    line = (row.to(tl.int64) * splits + split) * queries + mine
    made, places = tl.interleave(left, right), line[:, None] * DIM + tl.arange(0, DIM)[None, :]
    if SPLIT:
        tl.store(max_and_sum + 2 * line, most, mask=there)
        tl.store(max_and_sum + 2 * line + 1, total, mask=there)
    else:
        if SINKS:
            total += _sink(sinks + mine, there, most)
        made /= total[:, None]
    tl.store(out + places, made.to(out.dtype.element_ty), mask=there[:, None])


@triton.jit
def merge_splits(
    parts,
    max_and_sum,
    out,
    sinks,
    queries,
    splits,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Of one query's splits what they made, each by its share of the softmax, which has its sink
    too with SINKS [queries]."""
    _after_the_last()
    row = (tl.program_id(0) // queries).to(tl.int64)
    query = tl.program_id(0) % queries
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, DIM)
    there = split < splits
    at = (row * splits + split) * queries + query
    most = tl.load(max_and_sum + 2 * at, mask=there, other=float("-inf"))
    highest = tl.max(most, axis=0)
    weight = tl.exp2(most - highest)
    total = tl.sum(weight * tl.load(max_and_sum + 2 * at + 1, mask=there, other=0.0), axis=0)
    if SINKS:
        total += _sink(sinks + query, query < queries, highest)
    each = tl.load(parts + at[:, None] * DIM + column[None, :], mask=there[:, None], other=0.0)
    made = tl.sum(each * weight[:, None], axis=0) / total
    tl.store(out + (row * queries + query) * DIM + column, made.to(out.dtype.element_ty))


@triton.jit
def apply_sinks(out, log_sums, sinks, lines, heads, DIM: tl.constexpr, LINES: tl.constexpr):
    """Of LINES of `out` [lines, DIM], of a row and head each, the share of the softmax that is not
    the sink's; `log_sums` [lines] is log2 of the others' sum. A line that saw no token is 0, as its
    sum is next to none."""
    _after_the_last()
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    there = line < lines
    log_sum = tl.load(log_sums + line, mask=there, other=0.0)
    share = 1.0 / (1.0 + _sink(sinks + line % heads, there, log_sum))
    places = line.to(tl.int64)[:, None] * DIM + tl.arange(0, DIM)[None, :]
    x = tl.load(out + places, mask=there[:, None], other=0.0).to(tl.float32) * share[:, None]
    tl.store(out + places, x.to(out.dtype.element_ty), mask=there[:, None])


@triton.jit
def copy_pages(
    keys,
    values,
    page_stride,
    pages,
    keys_copy,
    values_copy,
    numbers,
    parts,
    BLOCK: tl.constexpr,
):
    """BLOCK of the `numbers` keys and values of one of the pages, in the order of `pages`."""
    _after_the_last()
    turn = tl.program_id(0) // parts
    at = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    inside = at < numbers
    source = tl.load(pages + turn).to(tl.int64) * page_stride + at
    into = turn.to(tl.int64) * numbers + at
    kind = keys_copy.dtype.element_ty
    tl.store(keys_copy + into, tl.load(keys + source, mask=inside).to(kind), mask=inside)
    tl.store(values_copy + into, tl.load(values + source, mask=inside).to(kind), mask=inside)
