"""Our GPU kernels of rows: made without a GPU and a C compiler, and an image is built with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import triton
from interpreted import run

from kvline_server.kernels import build, cubins, cuda_write
from kvline_server.kernels.cubins import Built

ELF = b"\x7fELF"


def test_each_variant_has_a_name_of_its_own() -> None:
    names = [v.name for v in build.variants()]
    assert len(names) == len(set(names)) > 100


@pytest.mark.kernels
def test_kernels_are_made_without_a_compiler_and_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", str(tmp_path / "no-compiler"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    kernels = ("score-*bf16", "draw-*fp32", "write-")
    some = [next(v for v in build.variants() if v.name.startswith(name)) for name in kernels]
    monkeypatch.setattr(build, "variants", lambda: some)
    file = tmp_path / "cubins.bin"
    assert build.build(file) == len(some)
    made = msgspec.msgpack.decode(file.read_bytes(), type=Built)
    for variant in some:
        cubin = made.cubins[variant.name]
        assert cubin.code.startswith(ELF) and cubin.warps == variant.warps
        assert cubin.entry == variant.kernel

    monkeypatch.setattr(cubins, "BUILT", file)
    cubins._built.cache_clear()
    assert set(cubins._built(90)) == set(made.cubins)
    cubins._built.cache_clear()
    assert cubins._built(80) == {}, "made for another GPU"
    monkeypatch.setattr(cubins, "source_hash", lambda: "changed since")
    cubins._built.cache_clear()
    assert cubins._built(90) == {}, "made from another source"
    cubins._built.cache_clear()


# They load states while convolve_rows runs, which does not write them; what it writes is read
# behind the wait (test_recurrent_kernels, late).
LOADS_BEFORE = ("delta_rows", "scan_rows")


@pytest.mark.kernels
@pytest.mark.parametrize("kernel", ["score", "draw", "mask", *cubins.CHAINED])
def test_a_kernel_that_starts_early_waits_before_it_reads(
    kernel: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And before it writes."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    made, compile = [], triton.compile

    def kept(*words: Any, **options: Any) -> Any:
        made.append(compile(*words, **options))
        return made[-1]

    monkeypatch.setattr(triton, "compile", kept)
    cubins.compile(next(v for v in build.variants() if v.kernel == kernel), build.CAPABILITY)
    code = made[0].asm["ptx"]
    assert ("griddepcontrol.wait" in code) == (kernel in cubins.CHAINED)
    if kernel in cubins.CHAINED:
        wait = code.index("griddepcontrol.wait")
        reads = [code.index(name) for name in ("ld.global", "cp.async") if name in code]
        assert reads and (wait < min(reads)) == (kernel not in LOADS_BEFORE)
        assert all(wait < code.index(name) for name in ("st.global", "atom.global") if name in code)


@pytest.mark.parametrize(
    ("needs", "why"),
    [
        ((144, 8, 128), "144 heads of queries and 8 of keys, kernels support at most 128 and 64"),
        ((72, 8, 256), "72 heads of queries and 8 of keys, kernels support at most 64 and 64"),
        ((32, 32, 96), "head size 96, kernels support 64, 128, 256"),
        ((32, 32, 64, 16), "16 elements of a head are rotated, kernels support multiples of 32"),
    ],
)
def test_what_no_prebuilt_kernel_does_is_named(needs: Any, why: str) -> None:
    cuda_write.check(128, 8, 128)
    cuda_write.check(64, 8, 256, 64)
    with pytest.raises(RuntimeError, match=why):
        cuda_write.check(*needs)


DRAW = """
import numpy as np, torch, triton.language as tl
from kvline_server.model.shard import Shard, tokens
from kvline_server.ipc.seeds import keys
from kvline_server.kernels import triton_kernels
from kvline_server.kernels.best import token_of
from kvline_server.kernels.layout import SamplingMetadata
from kvline_server.kernels.noise import gumbel_max
from kvline_server.kernels.torch_sampling import TorchSampling
from ties import same_draws

rows, vocabulary, PARTS = 24, 5003, 8
rng = np.random.default_rng(1)
logits = torch.from_numpy(rng.normal(0, 2.5, (rows, vocabulary)).astype(np.float32))
logits[3, 7], logits[4, 9], logits[5] = float("nan"), float("inf"), float("-inf")
logits[8, 4000] = logits[8, 100] = 99.0
temperatures = rng.choice([0.0, 0.6, 1.0, 1.5], rows).astype(np.float32)
temperatures[8] = 0.0
made = keys(np.arange(rows, dtype=np.uint64), np.zeros(rows, np.uint64))
ones = np.ones(rows, np.float32)
off = (0 * ones).astype(np.int32)
metadata = SamplingMetadata(temperatures, off, ones, 0 * ones, made)
want = TorchSampling().choose(logits.clone(), metadata)

def draw(weights, temperatures, logits, first=None):
    chosen = torch.empty(rows, dtype=torch.int64)
    tops = torch.empty(rows * PARTS)
    founds = torch.empty(rows * PARTS, dtype=torch.int32)
    scratch = (tops, founds, torch.zeros(rows, dtype=torch.int32))
    key = torch.from_numpy(made.view(np.int64))
    at = key if temperatures is None else torch.from_numpy(temperatures)
    triton_kernels.draw[(rows * PARTS,)](
        weights, weights.stride(0), at, key, chosen, *scratch, tl.constexpr(weights.shape[1]),
        first or 0, LOGITS=logits, MERGED=int(first is not None), BLOCK=512, PARTS=PARTS
    )
    return chosen

weights = torch.softmax(logits, dim=-1)
weights[5] = 0
whole = torch.arange(rows) != 5
whole[3:5] = False
got = draw(logits, temperatures, 1)
same_draws(got, want, logits, metadata, 2e-6)
assert (got[3:6] == -1).all() and (got >= 0).sum() == rows - 3 and got[8] == 100
for ranks in (2, 3):
    shares = [tokens(vocabulary, Shard(rank, ranks)) for rank in range(ranks)]
    every = [draw(logits[:, own.start : own.stop], temperatures, 1, own.start) for own in shares]
    merged = token_of(torch.stack(every).amax(dim=0))
    same_draws(merged, want, logits, metadata, 2e-6)
    assert merged[8] == 100
got = draw(weights, None, 0)
assert (got[3:6] == -1).all()
drawn, ones = gumbel_max(weights.clone(), made)[whole], ones[whole]
metadata = SamplingMetadata(ones, off[whole], ones, 0 * ones, made[whole])
same_draws(got[whole], drawn, logits[whole], metadata, 2e-6)
"""


SCORE = """
import torch, triton.language as tl
from kvline_server.kernels import triton_kernels
from kvline_server.kernels.torch_sampling import TorchSampling

reference = TorchSampling()

rows, vocabulary = 9, 1501
torch.manual_seed(2)
logits, targets = 3 * torch.randn(rows, vocabulary), torch.randint(vocabulary, (rows,))

def score(logits, targets, given):
    values, normalisers = torch.empty(2, rows)
    ranks = torch.empty(rows, dtype=torch.int32)
    triton_kernels.score[(rows,)](
        logits, logits.stride(0), targets, values, ranks, normalisers,
        tl.constexpr(logits.shape[1]), GIVEN=given, BLOCK=512
    )
    return values, ranks, normalisers

want, (values, ranks, _) = reference.score(logits, targets, 0), score(logits, targets, 0)
torch.testing.assert_close(values, want.values)
assert (ranks == want.ranks).all()
chosen = logits.gather(1, targets[:, None])[:, 0]
for part in logits[:, :700], logits[:, 700:]:
    want, (_, ranks, normalisers) = reference.shard_scores(part, chosen, 0), score(part, chosen, 1)
    torch.testing.assert_close(normalisers, want.normalisers)
    assert (ranks == want.above + 1).all()
"""


MASK = """
import numpy as np, torch, triton.language as tl
from kvline_server.kernels import triton_kernels
from kvline_server.kernels.torch_sampling import TorchSampling
from kvline_server.model.shard import Shard, tokens
from kvline_server.worker.step import MASK_BITS, TokenMasks, mask_words

rows, vocabulary, BLOCK = 6, 1203, 256
torch.manual_seed(3)
logits = torch.randn(rows, vocabulary)
bits = torch.randint(-(1 << 31), 1 << 31, (3, mask_words(vocabulary)), dtype=torch.int32)
bits[1, 5:9], bits[2, 20:] = 0, -1
masks = TokenMasks(np.array([0, 2, 5]), bits.numpy().reshape(-1))
for ranks in (1, 2, 3, 5):
    for own in (tokens(vocabulary, Shard(rank, ranks)) for rank in range(ranks)):
        part = logits[:, own.start : own.stop]
        at, words = torch.from_numpy(masks.rows), torch.from_numpy(masks.within(own))
        first, blocks = own.start % MASK_BITS, -(-len(own) // BLOCK)
        want, got = part.clone(), part.clone()
        TorchSampling().mask(want, at, words, first)
        triton_kernels.mask[(len(at) * blocks,)](
            got, got.stride(0), at, words, words.shape[1], len(own), first, blocks, BLOCK=BLOCK
        )
        assert torch.equal(got, want)
        assert want.isinf().any() and torch.equal(want[[1, 3, 4]], part[[1, 3, 4]])
"""


ONE_ROW = """
import torch, triton.language as tl
from torch.nn.functional import linear, rms_norm, silu
from kvline_server.kernels import triton_kernels

triton_kernels._after_the_last = lambda: None  # an instruction that the interpreter has not
torch.manual_seed(0)
EPS = 1e-5

def run(x, norm, weight, bias, out, **options):
    outputs, inputs = out.shape[1], x.shape[1]
    triton_kernels.one_row[(-(-outputs // 8),)](
        x, norm, EPS, weight, bias, out, outputs, tl.constexpr(inputs),
        OUTPUTS=8, INPUTS=256, **options
    )
    return out

for outputs, inputs in ((48, 576), (44, 128)):
    x, norm, bias = torch.randn(1, inputs), torch.rand(inputs) + 0.5, torch.randn(outputs)
    both = torch.randn(2 * outputs, inputs) / inputs**0.5
    weight, residual = both[:outputs].contiguous(), torch.randn(1, outputs)
    normed = rms_norm(x, (inputs,), norm, EPS)
    for on in (0, 1):
        b = bias if on else None
        got = run(x, norm, weight, bias, residual.clone(), NORM=0, GATED=0, BIAS=on, ADD=1)
        torch.testing.assert_close(got, residual + linear(x, weight, b))
        empty = torch.empty(1, outputs)
        got = run(x, norm, weight, bias, empty, NORM=0, GATED=0, BIAS=on, ADD=0)
        torch.testing.assert_close(got, linear(x, weight, b))
        got = run(x, norm, weight, bias, empty, NORM=1, GATED=0, BIAS=on, ADD=0)
        torch.testing.assert_close(got, linear(normed, weight, b))
    gate, up = linear(normed, both).chunk(2, dim=1)
    got = run(x, norm, both, bias, empty, NORM=1, GATED=1, BIAS=0, ADD=0)
    torch.testing.assert_close(got, silu(gate) * up)
"""


LL = """
import torch
from kvline_server.kernels import triton_kernels

triton_kernels._after_the_last = lambda: None  # an instruction that the interpreter has not
SLOT, BLOCK, PROGRAMS = 1024, 64, 4  # words

def words(x):
    return x.view(torch.int32)

def sums(ranks, sizes):
    torch.manual_seed(ranks)
    inboxes = torch.zeros(ranks, 2, ranks, SLOT, dtype=torch.int64)  # of each rank
    epochs = torch.zeros(ranks, PROGRAMS, dtype=torch.int32)
    counts = [0] * PROGRAMS
    for size in sizes:
        programs = min(PROGRAMS, -(-size // BLOCK))
        counts = [count + (p < programs) for p, count in enumerate(counts)]
        of = torch.tensor([counts[at // BLOCK % PROGRAMS] for at in range(size)])
        parts = torch.randn(ranks, 2 * size).bfloat16()
        residual = torch.randn(2 * size).bfloat16()
        want = residual.float()
        for part in parts:
            want += part.float()
        sent = (of << 32) | (words(parts).to(torch.int64) & 0xFFFFFFFF)
        at = torch.arange(size)
        for rank in range(ranks):
            # What the peers have written when it reads: a program of the interpreter cannot wait.
            before = inboxes.clone()
            for other in range(ranks):
                if other != rank:
                    inboxes[rank, of % 2, other, at] = sent[other]
            pointers = torch.tensor([inbox.data_ptr() for inbox in inboxes])
            made = residual.clone()
            triton_kernels.one_shot_ll[(programs,)](
                pointers, epochs[rank], words(parts[rank]), words(made), size, rank,
                SLOT=SLOT, RANKS=ranks, BLOCK=BLOCK
            )
            # The interpreter cuts numbers off and a GPU does not.
            torch.testing.assert_close(made.float(), want, rtol=2**-7, atol=0)
            assert epochs[rank].tolist() == counts
            for other in range(ranks):  # it wrote to every other, there and nowhere else
                if other != rank:
                    before[other, of % 2, rank, at] = sent[rank]
                    assert torch.equal(before[other], inboxes[other])

sums(2, (16, 1000, 16, 100, 1024, 8, 200))
for ranks in (3, 8):
    sums(ranks, (600, 16, 70))
"""


WRITE = """
import torch
from interpreted import launcher
from kvline_server.kernels import cuda_write, triton_cache
from kvline_server.kernels.attention import Heads, SlotMapping
from kvline_server.kernels.torch import TorchKernels
from kvline_server.memory.arena import KVLayer, Scales
from kvline_server.model.positions import Rope
from kvline_server.model.rope import cos_sin

play = launcher(triton_cache)
FP8, PAGE, rows, queries, kv = torch.float8_e4m3fn, 16, 7, 5, 3
torch.manual_seed(1)
attention = TorchKernels().attention
positions, slots = torch.randint(50, (rows,)), torch.randperm(3 * PAGE)[:rows]


def launch(variant, programs, *arguments):
    # The interpreter casts some numbers to fp8 wrongly (a carry of the mantissa is lost).
    play(variant, programs, *(each.wide if isinstance(each, Wide) else each for each in arguments))


class Wide:  # in the place of pages in fp8, for the kernel those in float32
    dtype = FP8

    def __init__(self, wide):
        self.wide, self.stride = wide, wide.stride


cuda_write.launch = launch


def compare(cached, scales, dim, rotary, norms):
    given = torch.randn(rows, queries + 2 * kv, dim)
    given[3, queries:] *= 1e4  # beyond the range of fp8
    table = cos_sin(Rope(10000.0, rotary_dim=rotary), dim, 50) if rotary else None
    pages = [torch.zeros(2, 3, PAGE, kv, dim, dtype=kind) for kind in (cached, torch.float32)]
    made = [Heads(given.clone(), queries, kv, *norms, 1e-5) for _ in pages]
    mapping = SlotMapping(positions, slots)
    theirs = None if table is None else attention.rope_table(*table)
    attention.write(made[0], theirs, mapping, KVLayer(*pages[0], scales))
    ours = None if table is None else torch.cat(table, dim=-1)
    kept = map(Wide, pages[1]) if cached == FP8 else pages[1]
    cuda_write.write(made[1], ours, mapping, KVLayer(*kept, scales))
    q, own_q = (each.fused[:, :queries] for each in made)
    torch.testing.assert_close(own_q, q)
    # Elements that are not rotated are as they were given, or normed.
    same = torch.equal(own_q[..., rotary:], given[:, :queries, rotary:])
    assert same == (norms[0] is None or rotary == dim)
    return [each.to(cached).float() for each in pages]


CASES = (64, 0, False), (64, 32, True), (128, 96, False), (64, 64, True), (256, 64, True)
for dim, rotary, normed in CASES:
    norms = (torch.rand(dim) + 0.5, torch.rand(dim) + 0.5) if normed else (None, None)
    want, got = compare(torch.float32, Scales(), dim, rotary, norms)
    torch.testing.assert_close(got, want)
    for scales in (Scales(), Scales(0.11, 0.013)):
        want, got = compare(FP8, scales, dim, rotary, norms)
        assert got.isfinite().all() and got.abs().max() == 448 == want.abs().max()
        torch.testing.assert_close(got, want, rtol=0.125, atol=2**-9)  # to either side of a tie
        assert (got == want).float().mean() > 0.999
"""


@pytest.mark.kernels
@pytest.mark.parametrize(
    "script",
    [SCORE, DRAW, MASK, ONE_ROW, LL, WRITE],
    ids=["score", "draw", "mask", "one_row", "one_shot_ll", "write"],
)
def test_the_gpu_s_kernels_are_the_reference_s(script: str) -> None:
    """In Triton's interpreter. Tokens are the same ones: the same noise from the same keys, and
    none where a row has a NaN, an infinity or nothing at all."""
    run(script)
