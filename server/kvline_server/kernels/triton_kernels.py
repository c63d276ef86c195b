"""Our own Triton kernels; kernels/cubins.py compiles and launches them.

`score` runs one program per row of logits, reads each once and needs no fp32 copy of the chunk.
`draw` runs several per row, and derives its noise from the row's key and the token id
(kernels/noise.py), so each seeded request has noise of its own; library generators are shared by
the batch. `mask` forbids the tokens that a grammar does not allow. `one_row` is a linear of one row
with the norm before it, the activation or the sum after it. `one_shot` and `one_shot_ll` are
all-reduces of few rows.
Reference: kernels/torch_*.py; the tests compare the two.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _after_the_last():
    """For a kernel that is launched while the one before it runs: waits for its results, and lets
    the next one be launched (programmatic dependent launch)."""
    gdc_wait()
    gdc_launch_dependents()


@triton.jit
def score(
    logits,
    stride,
    targets,
    values,
    ranks,
    normalisers,
    vocabulary,
    GIVEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """With GIVEN, `targets` holds the targets' logits and `logits` may be a rank's part of them;
    else it holds the targets' ids."""
    row = tl.program_id(0)
    start_of_row = logits + row.to(tl.int64) * stride
    if GIVEN:
        chosen = tl.load(targets + row)
    else:
        chosen = tl.load(start_of_row + tl.load(targets + row)).to(tl.float32)
    most = -1.0e30
    total = tl.zeros((BLOCK,), tl.float32)
    above = tl.zeros((BLOCK,), tl.int32)
    # One maximum per block, not per lane: then each logit costs one exponential, the main cost.
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(start_of_row + at, mask=at < vocabulary, other=-1.0e30).to(tl.float32)
        above += (x > chosen).to(tl.int32)
        now = tl.maximum(most, tl.max(x, axis=0))
        total = total * tl.exp(most - now) + tl.exp(x - now)
        most = now
    normaliser = most + tl.log(tl.sum(total, axis=0))
    tl.store(values + row, chosen - normaliser)
    tl.store(normalisers + row, normaliser)
    tl.store(ranks + row, tl.sum(above, axis=0) + 1)


@triton.jit
def _mixed(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _noise(at, low, high):
    """Exponential noise of each token id, from the row's key."""
    hashed = _mixed(_mixed(at.to(tl.uint32) * 0x9E3779B1 + low) ^ high)
    u = tl.minimum(((hashed >> 1).to(tl.float32) + 0.5) * (1.0 / 2147483648.0), 1.0 - 2.0**-24)
    # -log1p(-u), which Triton has only from a library: a series where 1 - u loses digits.
    return tl.where(u < 0.015625, u * (1.0 + u * (0.5 + u * (1.0 / 3.0))), -tl.log(1.0 - u))


@triton.jit
def _ordered(score, token):
    """One number of both, as in kernels/best.py."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)  # no -0.0
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) << 32
    return order | (0x7FFFFFFF - token)


@triton.jit
def draw(
    weights,
    stride,
    temperatures,
    keys,
    chosen,
    tops,
    founds,
    done,
    vocabulary,
    first,
    LOGITS: tl.constexpr,
    MERGED: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """A row's vocabulary in PARTS programs, of which the last to end compares all. A temperature of
    0 takes the highest logit. With MERGED they are tokens from `first` on, `chosen` for best.py."""
    row = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    start_of_row = weights + row.to(tl.int64) * stride
    key = tl.load(keys + row)
    low = key.to(tl.uint32)
    high = (key >> 32).to(tl.uint32)
    least = float("-inf") if LOGITS else 0.0
    temperature = tl.load(temperatures + row) if LOGITS else 1.0
    scale = tl.where(temperature > 0.0, 1.0 / temperature, 1.0) if LOGITS else 1.0
    best = tl.full((BLOCK,), least, tl.float32)
    index = tl.zeros((BLOCK,), tl.int32)
    broken = tl.zeros((BLOCK,), tl.int32)
    for block in range(0, vocabulary, BLOCK * PARTS):
        at = block + part * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(start_of_row + at, mask=at < vocabulary, other=least).to(tl.float32)
        score = x * scale
        if LOGITS:
            if temperature > 0.0:
                score -= tl.log(_noise(at + first, low, high))
        else:
            score = x / _noise(at, low, high)
        broken |= (x != x).to(tl.int32)
        better = score > best
        best = tl.where(better, score, best)
        index = tl.where(better, at, index)
    top = tl.max(best, axis=0)
    found = tl.min(tl.where(best == top, index, vocabulary), axis=0)
    top = tl.where(tl.max(broken, axis=0) == 0, top, float("inf"))
    tl.store(tops + tl.program_id(0), top)
    tl.store(founds + tl.program_id(0), found)
    last = tl.atomic_add(done + row, 1) == PARTS - 1
    if last:
        every = row * PARTS + tl.arange(0, PARTS)
        values = tl.load(tops + every, volatile=True)
        top = tl.max(values, axis=0)
        indices = tl.load(founds + every, volatile=True)
        found = tl.min(tl.where(values == top, indices, vocabulary), axis=0)
    good = (top > least) & (top < float("inf"))
    token = tl.where(good, found + first, -1).to(tl.int64)
    tl.store(chosen + row, _ordered(top, token) if MERGED else token, mask=last)


@triton.jit
def mask(logits, stride, rows, words, count, tokens, first, blocks, BLOCK: tl.constexpr):
    """Minus infinity where a token's bit is 0: of token t the bit `first` + t of the row's words,
    of which there are `count`."""
    row = tl.program_id(0) // blocks
    token = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    bit = token + first
    own = words + row.to(tl.int64) * count
    word = tl.load(own + (bit >> 5), mask=inside, other=-1)
    forbidden = ((word >> (bit & 31)) & 1) == 0
    start_of_row = logits + tl.load(rows + row) * stride
    infinity = tl.full((BLOCK,), float("-inf"), logits.dtype.element_ty)
    tl.store(start_of_row + token, infinity, mask=inside & forbidden)


@triton.jit
def one_row(
    x,
    norm,
    eps,
    weight,
    bias,
    out,
    outputs,
    inputs,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
):
    """OUTPUTS numbers of W x: of rms_norm(x) with NORM, added to `out` with ADD; GATED: silu of W's
    first half times its second."""
    _after_the_last()
    column = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    there = column < outputs
    gates = weight + column[:, None].to(tl.int64) * inputs
    ups = gates + outputs.to(tl.int64) * inputs
    # Summed over the inputs at the end: one row has no use for tensor cores.
    first = tl.zeros((OUTPUTS, INPUTS), tl.float32)
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
        first += a[None, :] * w.to(tl.float32)
        if GATED:
            w = tl.load(ups + at[None, :], mask=whole, other=0.0)
            second += a[None, :] * w.to(tl.float32)
    scale = tl.rsqrt(tl.sum(squares, axis=0) / inputs + eps) if NORM else 1.0
    made = tl.sum(first, axis=1) * scale
    if BIAS:
        made += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)
    if GATED:
        made *= tl.sigmoid(made) * tl.sum(second, axis=1) * scale
    if ADD:
        made += tl.load(out + column, mask=there, other=0.0).to(tl.float32)
    tl.store(out + column, made.to(out.dtype.element_ty), mask=there)


@triton.jit
def one_shot(buffers, flags, residual, elements, rank, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """Adds every rank's buffer to the residual. A program needs of another rank only that its
    buffer is written, which that rank's program of the same number says with a flag. Buffers are
    used in turn, so nobody has to wait for who still reads this one."""
    _after_the_last()
    program = tl.program_id(0)
    own = tl.load(flags + rank).to(tl.pointer_type(tl.int32)) + program * RANKS
    for step in tl.static_range(1, RANKS):
        peer = (rank + step) % RANKS
        flag = tl.load(flags + peer).to(tl.pointer_type(tl.int32)) + program * RANKS + rank
        while tl.atomic_cas(flag, 0, 1, sem="release", scope="sys") != 0:
            pass
    for step in tl.static_range(1, RANKS):
        flag = own + (rank + step) % RANKS
        while tl.atomic_cas(flag, 1, 0, sem="acquire", scope="sys") != 1:
            pass
    kind = residual.dtype.element_ty
    for start in range(program * BLOCK, elements, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < elements
        total = tl.load(residual + at, mask=inside).to(tl.float32)
        for other in tl.static_range(RANKS):  # in one order: the same sum on every rank
            buffer = tl.load(buffers + other).to(tl.pointer_type(kind))
            part = tl.load(tl.multiple_of(buffer, 16) + at, mask=inside, cache_modifier=".cg")
            total += part.to(tl.float32)
        tl.store(residual + at, total.to(kind), mask=inside)


@triton.jit
def _pair(word):
    """The two bfloat16 numbers of a 32-bit word, as float32."""
    return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _word(low, high):
    low = low.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return (high.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) << 16) | low


@triton.jit
def one_shot_ll(
    inboxes,
    epochs,
    part,
    residual,
    words,
    rank,
    SLOT: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """As one_shot, of fewer elements: every rank writes its part into the others' inboxes, two
    elements and the program's epoch in each store of 64 bits, which no GPU splits: who reads the
    epoch has the elements. `part` and `residual` are bfloat16, taken as 32-bit words. The sum after
    the next writes to the same half of the inbox: the others have read it by then, or they would
    not have sent their parts of the next one."""
    _after_the_last()
    program = tl.program_id(0)
    epoch = tl.load(epochs + program) + 1
    half = (epoch & 1) * (RANKS * SLOT)
    stride = tl.num_programs(0) * BLOCK
    start = program * BLOCK
    while start < words:
        at = start + tl.arange(0, BLOCK)
        mine = tl.load(part + at, mask=at < words, other=0).to(tl.int64) & 0xFFFFFFFF
        sent = (epoch.to(tl.int64) << 32) | mine
        for step in tl.static_range(1, RANKS):
            inbox = tl.load(inboxes + (rank + step) % RANKS).to(tl.pointer_type(tl.int64))
            tl.store(tl.multiple_of(inbox, 16) + half + rank * SLOT + at, sent, mask=at < words)
        start += stride
    inbox = tl.load(inboxes + rank).to(tl.pointer_type(tl.int64))
    start = program * BLOCK
    while start < words:
        at = start + tl.arange(0, BLOCK)
        inside = at < words
        mine = tl.load(part + at, mask=inside, other=0)
        low, high = _pair(tl.load(residual + at, mask=inside, other=0))
        for other in tl.static_range(RANKS):  # in one order: the same sum on every rank
            added = mine
            if other != rank:
                slot = tl.multiple_of(inbox, 16) + half + other * SLOT + at
                got = tl.load(slot, mask=inside, other=0, volatile=True)
                while tl.max((((got >> 32).to(tl.int32) != epoch) & inside).to(tl.int32), 0) != 0:
                    got = tl.load(slot, mask=inside, other=0, volatile=True)
                added = got.to(tl.int32)
            more_low, more_high = _pair(added)
            low += more_low
            high += more_high
        tl.store(residual + at, _word(low, high), mask=inside)
        start += stride
    tl.store(epochs + program, epoch)
