"""Recurrent layers on a GPU: our kernels against float64 in Triton's interpreter, and how a step is
cut for them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from interpreted import SHARED, compiled, run

from kvline_server.kernels import cuda_delta_rule, cuda_recurrent, cuda_scan, tiles
from kvline_server.kernels.recurrent import (
    CHUNK,
    Convolution,
    Decay,
    DeltaRule,
    Scan,
    Sequences,
    Snapshots,
)
from kvline_server.kernels.tiles import AT_ONCE, FEW, SMALL

SETUP = """
import numpy as np, torch
from float64_recurrent import expected
from interpreted import launcher
from kvline_server.kernels import (
    cuda_convolution, cuda_delta_rule, cuda_recurrent, cuda_scan, triton_delta_rule,
    triton_recurrent, triton_scan,
)
from kvline_server.kernels.cuda_recurrent import CudaRecurrent
from kvline_server.kernels.projection import Norm
from kvline_server.kernels.recurrent import *
from kvline_server.kernels.torch_recurrent import TorchRecurrent

cuda_delta_rule.MERGING = "ieee"  # the interpreter has no other that is as near
cuda_delta_rule.launch = launcher(triton_delta_rule)
cuda_scan.launch = launcher(triton_scan)
cuda_convolution.launch = cuda_recurrent.launch = launcher(triton_recurrent)
cuda_recurrent.upload = lambda _, *arrays: [
    torch.from_numpy(np.ascontiguousarray(each).reshape(-1)) for each in arrays
]
new_empty, nan = torch.Tensor.new_empty, float("nan")

def broken(made):  # what is not written shows
    return made.fill_(nan) if made.is_floating_point() else made

torch.Tensor.new_empty = lambda *a, **k: broken(new_empty(*a, **k))
kernels = CudaRecurrent(torch.device("cpu"))
torch.manual_seed(0)

def spread(count):
    return torch.linspace(-3, 1, count)[torch.randperm(count)]

def delta_rule():
    made = Convolution(torch.randn((2 * 1 + 2) * 128, 4) / 2)
    return DeltaRule(1, 2, 128, 128, made, Decay(spread(2), spread(2))), (2, 128, 128), 4

def scan():
    channels = 4 * 64 + 2 * 2 * 128
    made = Convolution(torch.randn(channels, 4) / 2, torch.randn(channels))
    made = Scan(4, 64, 2, 128, made, Decay(spread(4), spread(4)), torch.randn(4))
    return made, (4, 64, 128), 4

"""
CHECKS = """
def near(got, want):
    off = float((got.double() - want).norm() / want.norm())
    assert off < 2e-6, off

for layer, shape, gates in (delta_rule(), scan()):
    channels = len(layer.convolution.weight)
    inputs, matrices = torch.full((12, 3, channels), nan), torch.full((12, *shape), nan)
    states = States(inputs, matrices)

    def step(x, more, steps, snapshots=None):
        counts, slots, sources = zip(*steps)
        starts = np.cumsum((0, *counts)).astype(np.int32)
        plan = kernels.plan(Sequences(starts, np.array(slots), np.array(sources), snapshots))
        call = kernels.delta_rule if isinstance(layer, DeltaRule) else kernels.scan
        return call(x, more, layer, states, plan)

    # What follows the last sequence is NaN, as is every slot.
    lengths = (1, 3, 9, 17, 70)
    rows = torch.randn(sum(lengths) + 1, channels + 16)
    rows[-1] = nan
    x, more = rows[:, :channels], rows[:, channels : channels + gates]
    kept = Snapshots(*(np.array([each]) for each in (4, 64, 9)))
    steps = [(count, slot, DUMMY) for slot, count in enumerate(lengths, 1)]
    got = step(x, more, steps, kept)
    assert (got[-1] == 0).all()
    start = 0
    for count, slot, _ in steps:
        own = slice(start, start + count)
        want = expected(layer, x[own], more[own])
        near(got[own], want[0])
        assert torch.equal(inputs[slot].double(), want[1])
        near(matrices[slot], want[2])
        start += count
    # A snapshot is read by two, one of which has but a few rows; padding asks for its slot.
    own = slice(start - 70, start)
    want = expected(layer, x[own], more[own])
    near(matrices[9], expected(layer, x[own][:64], more[own][:64])[2])
    left, gate = x[own][64:], more[own][64:]
    both = torch.cat((left, left[:2], left[:1])), torch.cat((gate, gate[:2], gate[:1]))
    got = step(*both, [(6, 10, 9), (2, 11, 9), (1, DUMMY, DUMMY)])
    near(got[:6], want[0][64:])
    near(got[6:8], want[0][64:66])
    near(matrices[10], want[2])
    assert (got[8] == 0).all()
    got = step(left[2:], gate[2:], [(4, 11, 11)])
    near(got, want[0][66:])
    near(matrices[11], want[2])
    assert matrices[[0, 6, 7, 8]].isnan().all() and inputs[[0, 6, 7, 8]].isnan().all()

cpu = TorchRecurrent(torch.device("cpu"))
x, gate = torch.randn(3, 6 * 128), torch.randn(3, 6 * 128 + 16)[:, :-16]
for name in ("silu", "sigmoid"):
    norm = Norm(torch.randn(128), 1e-3)
    want = cpu.norm_then_gate(x, gate, norm, name)
    near(kernels.norm_then_gate(x, gate, norm, name), want.double())
for groups in (1, 6):
    norm = Norm(torch.randn(6 * 128), 1e-3)
    want = cpu.gate_then_norm(x, gate, norm, groups)
    near(kernels.gate_then_norm(x, gate, norm, groups), want.double())
"""


# Of a few rows, a small tile and a large one, each of which goes on from a state in bfloat16.
ROUNDED = """
layer, shape, gates = delta_rule()
channels, counts = len(layer.convolution.weight), (2, 12, 22)
rows = torch.randn(sum(counts), channels + 16)
x, more = rows[:, :channels], rows[:, channels : channels + gates]
before, inputs = torch.randn(5, *shape).bfloat16(), torch.randn(5, 3, channels)
starts, slots = np.cumsum((0, *counts)).astype(np.int32), np.arange(1, 4)
plan, made = kernels.plan(Sequences(starts, slots, slots)), []
for matrices in (before.float(), before.clone()):
    states = States(inputs.clone(), matrices)
    made.append((kernels.delta_rule(x, more, layer, states, plan), matrices))
(wide, exact), (small, stored) = made
assert torch.equal(small, wide) and stored.dtype == torch.bfloat16
cut = (exact.view(torch.int32) & -65536).view(torch.float32)
assert torch.equal(stored.float(), cut) and not torch.equal(cut, exact)
assert torch.equal(stored[[0, 4]], before[[0, 4]])
"""

# What convolve_rows writes is there once the kernel behind it has waited, and not before.
LATE = """
play, late, seen = cuda_convolution.launch, [], []

def convolve(variant, programs, *arguments):
    tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
    before = [each.clone() for each in tensors]
    play(variant, programs, *arguments)
    for each, old in zip(tensors, before):
        if not torch.equal(each, old):
            late.append((each, each.clone()))
            each.copy_(old)

def waited():  # of a launch's programs the first is the one that could have read too early
    seen.append(len(late))
    while late:
        each, new = late.pop()
        each.copy_(new)

modules = triton_delta_rule, triton_scan
for (layer, shape, gates), kernel in zip((delta_rule(), scan()), modules):
    channels, counts = len(layer.convolution.weight), (2, 1, 4)
    rows = torch.randn(sum(counts), channels + 16)
    x, more = rows[:, :channels], rows[:, channels : channels + gates]
    starts, slots = np.cumsum((0, *counts)).astype(np.int32), np.arange(1, 4)
    plan = kernels.plan(Sequences(starts, slots, slots))
    inputs, matrices, made = torch.randn(5, 3, channels), torch.randn(5, *shape), []
    for convolving, waiting in ((play, lambda: None), (convolve, waited)):
        cuda_convolution.launch, kernel._after_the_last = convolving, waiting
        states = States(inputs.clone(), matrices.clone())
        call = kernels.delta_rule if isinstance(layer, DeltaRule) else kernels.scan
        made.append((call(x, more, layer, states, plan), states.inputs, states.matrices))
    assert seen[0] > 0 and not late
    seen.clear()
    for one, other in zip(*made):
        assert torch.equal(one, other) and one.isfinite().all()
"""


@pytest.mark.kernels
@pytest.mark.timeout(300)
@pytest.mark.parametrize("checks", [CHECKS, ROUNDED, LATE], ids=["float32", "bfloat16", "late"])
def test_the_kernels_do_what_the_reference_does(checks: str) -> None:
    """In bfloat16 a state is loaded as it is, and rounded where it is stored: by the interpreter
    towards zero, by a GPU to nearest (tests/gpu/test_recurrent.py)."""
    run(SETUP + checks)


@pytest.mark.kernels
@pytest.mark.timeout(600)
def test_every_variant_compiles_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for name, made in compiled(cuda_recurrent.variants(torch.bfloat16), monkeypatch):
        assert made.shared <= SHARED, name
        names.add(name)
    assert len(names) == len(list(cuda_recurrent.variants(torch.bfloat16)))


def sequences(counts: list[int], kept: list[tuple[int, int, int]] | None = None) -> Sequences:
    starts = np.cumsum((0, *counts)).astype(np.int32)
    slots = np.arange(1, len(counts) + 1)
    snapshots = Snapshots(*np.array(kept).T) if kept else None
    return Sequences(starts, slots, slots * (slots % 2), snapshots)


def test_a_sequence_is_cut_by_its_rows() -> None:
    counts = [1, 200, SMALL, FEW, CHUNK, SMALL + 1]
    few = tiles.few(sequences(counts))
    assert few is not None and few.spans.tolist() == [[0, 1], [217, 225]]
    assert few.slots.tolist() == [1, 4] and few.sources.tolist() == [1, 0]
    small, large = tiles.tiled(sequences(counts, [(1, 64, 9), (4, 64, 8), (1, 128, 10)]))
    assert (small.rows, small.most, small.tiles.tolist()) == (SMALL, 1, [[201, SMALL, 201]])
    assert (small.sources.tolist(), small.slots.tolist()) == ([3], [3])
    assert (large.rows, large.most) == (CHUNK, 4)
    assert large.tiles.tolist() == [
        *([1, 64, 1], [65, 64, 1], [129, 64, 1], [193, 8, 1]),
        *([225, 64, 225], [289, 17, 289]),
    ]
    assert large.tile_sources.tolist() == [0, 0, 0, 0, 5, 0]
    assert large.chains.tolist() == [[0, 1, 0, 3], [4, 225, 3, 5], [5, 289, 5, 6]]
    assert large.stops.tolist() == [[1, 65], [2, 129], [4, 201], [5, 289], [5, 289], [6, 306]]
    assert large.slots.tolist() == [9, 10, 2, 8, 5, 6]


def test_what_is_computed_at_a_time_is_bounded() -> None:
    """But for one sequence's tiles; every sequence is in one group."""
    counts = [SMALL + 1] * (2 * AT_ONCE + 3) + [CHUNK * (AT_ONCE + 9)] + [65]
    groups = list(tiles.tiled(sequences(counts)))
    assert [len(group.tiles) for group in groups] == [AT_ONCE, AT_ONCE, 3, AT_ONCE + 9, 2]
    assert np.concatenate([group.slots for group in groups]).tolist() == [
        *range(1, len(counts) + 1)
    ]


def test_a_step_of_decodes_has_no_tiles() -> None:
    assert list(tiles.tiled(sequences([1, FEW]))) == [] and tiles.few(sequences([FEW + 1])) is None


def test_layers_without_kernels_are_refused_by_their_sizes() -> None:
    decay = Decay(torch.zeros(4), torch.zeros(4))
    convolution = Convolution(torch.zeros(1024, 4))
    cuda_delta_rule.check(DeltaRule(2, 4, 128, 128, convolution, decay))
    with pytest.raises(RuntimeError, match="64 by 128, kernels support 128 by 128"):
        cuda_delta_rule.check(DeltaRule(2, 4, 64, 128, convolution, decay))
    with pytest.raises(RuntimeError, match="not of 4 rows"):
        wide = Convolution(torch.zeros(1024, 3))
        cuda_delta_rule.check(DeltaRule(2, 4, 128, 128, wide, decay))
    cuda_scan.check(Scan(4, 64, 2, 128, convolution, decay, torch.zeros(4)))
    with pytest.raises(RuntimeError, match="4 heads of 80 by 128"):
        cuda_scan.check(Scan(4, 80, 2, 128, convolution, decay, torch.zeros(4)))
