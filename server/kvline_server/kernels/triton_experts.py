"""Triton kernels of mixtures of experts; kernels/cubins.py compiles and launches them.

A pair is a row with one of its experts. `route` chooses each row's experts, `sort` brings the pairs
of an expert together in tiles, `grouped` is a tile of one of an expert's two GEMMs, `add_chosen`
adds up each row's pairs. Nothing is read on the host: the grid is what a step may need at most, and
programs without a tile end at once. What comes out for a pair does not depend on its place among
the pairs, so neither do the results on the order in which atomics hand out places.
Reference: kernels/torch_experts.py; the tests compare the two.
"""

import triton
import triton.language as tl

from kvline_server.kernels.triton_kernels import _after_the_last, _ordered

DOWN, GATED, SQUARED = (tl.constexpr(kind) for kind in range(3))  # GEMMs of `grouped`
LEAST = tl.constexpr(1e-20)  # added to a sum of scores that others are divided by


@triton.jit
def _largest(by, shares, chosen, experts, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr):
    """The experts of the `chosen` largest numbers, and their shares. A NaN is the largest, and its
    share breaks the row; ids are experts' whatever the numbers are."""
    at = tl.arange(0, EXPERTS)
    turn = tl.arange(0, CHOSEN)
    left = tl.where(at < experts, _ordered(tl.where(by == by, by, float("inf")), at), -(1 << 63))
    id = tl.zeros((CHOSEN,), tl.int32)
    share = tl.zeros((CHOSEN,), tl.float32)
    for number in range(chosen):
        expert = 0x7FFFFFFF - (tl.max(left, axis=0) & 0x7FFFFFFF).to(tl.int32)
        left = tl.where(at == expert, -(1 << 63), left)
        id = tl.where(turn == number, expert, id)
        share = tl.where(turn == number, tl.sum(tl.where(at == expert, shares, 0.0), axis=0), share)
    return id, share


@triton.jit
def _played(how, first, experts, EXPERTS: tl.constexpr):
    """Numbers of which the largest are those of the experts that a row is to have."""
    at = tl.arange(0, EXPERTS)
    first = tl.where(how == 2, first, 0)
    turned = tl.where(at < first, at + experts, at) - first
    return tl.where(at < experts, -turned.to(tl.float32), float("-inf"))


@triton.jit
def route(
    logits,
    experts,
    chosen,
    renormalise,
    rows,
    played,
    given,
    bias,
    scale,
    ids,
    weights,
    places,
    counts,
    order,
    tiles,
    GIVEN: tl.constexpr,
    ALONE: tl.constexpr,
    SIGMOID: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
):
    """A row's softmax, the experts of its largest numbers, and the pair's place among those of its
    expert. With SIGMOID that of each logit in the place of the softmax; the largest are those with
    the bias added, which is not weighed, and weights are times `scale`. Rows that are not among the
    first `rows` get the id `experts`, which is no expert's; `played` is a Played. With GIVEN the
    two are `given[0]` and `given[1]`. With ALONE each pair is a tile: `sort` is left out."""
    _after_the_last()
    row = tl.program_id(0)
    at = tl.arange(0, EXPERTS)
    x = tl.load(logits + row * experts + at, mask=at < experts, other=float("-inf"))
    how = tl.load(given + 1) if GIVEN else played
    x = tl.where(how == 0, x.to(tl.float32), _played(how, row * chosen % experts, experts, EXPERTS))
    by, shares = x, x
    if SIGMOID:
        shares = tl.sigmoid(x)
        added = tl.load(bias + at, mask=at < experts, other=0.0)
        by = tl.where(how == 0, shares + added, x)
    else:
        shares = tl.exp(x - tl.max(x, axis=0))
    id, share = _largest(by, shares, chosen, experts, EXPERTS, CHOSEN)
    turn = tl.arange(0, CHOSEN)
    if SIGMOID:
        total = tl.where(renormalise != 0, tl.sum(share, axis=0) + LEAST, 1.0) / scale
    else:
        total = tl.sum(share, axis=0) if renormalise else tl.sum(shares, axis=0)
    real = row < (tl.load(given) if GIVEN else rows)
    pair, there = row * chosen + turn, turn < chosen
    tl.store(ids + pair, tl.where(real, id, experts), mask=there)
    tl.store(weights + pair, tl.where(real, share / total, 0.0), mask=there)
    if ALONE:
        tl.store(places + pair, tl.where(real, pair, -1), mask=there)
        tl.store(order + pair, tl.where(there, row, 0), mask=there)
        bound = tl.num_programs(0) * chosen
        tl.store(tiles + pair, id, mask=there)
        tl.store(tiles + bound + pair, pair, mask=there)
        tl.store(tiles + 2 * bound + pair, pair + real.to(tl.int32), mask=there)
    else:
        place = tl.atomic_add(counts + id, 1, mask=there & real, sem="relaxed")
        tl.store(places + pair, place, mask=there)


@triton.jit
def sort(
    ids,
    places,
    counts,
    order,
    tiles,
    experts,
    chosen,
    pairs,
    rows,
    bound,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Of BLOCK pairs, their places among all pairs in the order of experts, -1 for none, and the
    row at each place. Of BLOCK tiles of `rows` places, three tables of `bound` numbers: expert,
    first place, and the place after the last, which is the first where there is no tile."""
    _after_the_last()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.arange(0, EXPERTS)
    count = tl.load(counts + expert)
    id = tl.load(ids + at, mask=at < pairs, other=experts)
    before = tl.sum(tl.where(expert[None, :] < id[:, None], count[None, :], 0), axis=1)
    place = before + tl.load(places + at, mask=at < pairs, other=0)
    real = id < experts
    tl.store(places + at, tl.where(real, place, -1), mask=at < pairs)
    tl.store(order + place, at // chosen, mask=real)
    each = (count + rows - 1) // rows
    last = tl.cumsum(each, axis=0)[None, :] <= at[:, None]  # experts whose tiles come before
    own = tl.sum(last.to(tl.int32), axis=1)
    first = tl.sum(tl.where(last, count[None, :], 0), axis=1)
    end = first + tl.sum(tl.where(expert[None, :] == own[:, None], count[None, :], 0), axis=1)
    first += (at - tl.sum(tl.where(last, each[None, :], 0), axis=1)) * rows
    inside = at < bound
    tl.store(tiles + at, own, mask=inside)
    tl.store(tiles + bound + at, first, mask=inside)
    tl.store(tiles + 2 * bound + at, tl.minimum(end, first + rows), mask=inside)


@triton.jit
def _tile(tiles, bound):
    """A program's expert, and of the pairs' places its first and the one after its last."""
    tile = tl.program_id(0) % bound
    expert = tl.load(tiles + tile).to(tl.int64)
    return expert, tl.load(tiles + bound + tile), tl.load(tiles + 2 * bound + tile)


@triton.jit
def _places(order, first, end, ORDERED: tl.constexpr, ROWS: tl.constexpr):
    """The places of a tile's pairs, and the rows of x that they have: of the first GEMM those that
    `order` says."""
    place = first + tl.arange(0, ROWS)
    row = tl.minimum(place, end - 1)
    if ORDERED:
        row = tl.load(order + row)
    return place, row


@triton.jit
def _lines(expert, bound, outputs, GATED: tl.constexpr, OUTPUTS: tl.constexpr):
    """A program's outputs, and the weight's rows that they have."""
    column = tl.program_id(0) // bound * OUTPUTS + tl.arange(0, OUTPUTS)
    return column, expert * outputs * (1 + GATED) + tl.minimum(column, outputs - 1)


@triton.jit
def _store(out, place, end, column, outputs, total):
    into = out + place[None, :].to(tl.int64) * outputs + column[:, None]
    whole = (place < end)[None, :] & (column < outputs)[:, None]
    tl.store(into, total.to(out.dtype.element_ty), mask=whole)


@triton.jit
def grouped(
    x,
    order,
    weight,
    tiles,
    bound,
    out,
    outputs,
    inputs,
    GEMM: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """OUTPUTS columns of a tile of pairs, by their places: x W^T of the tile's expert. GATED: x has
    the rows, of which `order` says each place's; silu of W's first half times its second. SQUARED:
    x has the rows too; the square of what is positive. DOWN: x is by places, nothing follows. The
    weight is the left factor: its rows fill tensor cores, and the pairs may be few. Programs of the
    same columns follow each other, so an expert with several tiles finds them in the cache."""
    _after_the_last()
    expert, first, end = _tile(tiles, bound)
    if first >= end:
        return
    place, row = _places(order, first, end, GEMM != DOWN, ROWS)
    column, line = _lines(expert, bound, outputs, GEMM == GATED, OUTPUTS)
    at = tl.arange(0, INPUTS)
    right = x + row[None, :].to(tl.int64) * inputs + at[:, None]
    left = weight + line[:, None] * inputs + at[None, :]
    ups = left + outputs.to(tl.int64) * inputs
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    up = total
    for start in range(0, inputs, INPUTS):
        inside = at < inputs - start
        a = tl.load(right + start, mask=inside[:, None], other=0.0)
        w = tl.load(left + start, mask=inside[None, :], other=0.0)
        total = tl.dot(w, a, total)
        if GEMM == GATED:
            w = tl.load(ups + start, mask=inside[None, :], other=0.0)
            up = tl.dot(w, a, up)
    if GEMM == GATED:
        total *= tl.sigmoid(total) * up
    if GEMM == SQUARED:
        total = tl.where(total < 0, 0.0, total)  # a NaN stays one
        total *= total
    _store(out, place, end, column, outputs, total)


@triton.jit
def add_chosen(
    made,
    places,
    weights,
    out,
    chosen,
    outputs,
    parts,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK columns of a row: the sum of its pairs by their weights; 0 for a row without any."""
    _after_the_last()
    row = tl.program_id(0) // parts
    column = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    inside = column < outputs
    total = tl.zeros((BLOCK,), tl.float32)
    for turn in tl.static_range(CHOSEN):  # all of a column's terms are one thread's
        pair = row * chosen + turn
        place = tl.load(places + pair, mask=turn < chosen, other=-1).to(tl.int64)
        weight = tl.load(weights + pair, mask=turn < chosen, other=0.0)
        each = made + place * outputs + column
        total += tl.load(each, mask=inside & (place >= 0), other=0.0).to(tl.float32) * weight
    tl.store(out + row.to(tl.int64) * outputs + column, total.to(out.dtype.element_ty), mask=inside)
