"""Mixtures of experts on a GPU: our kernels against the reference in Triton's interpreter, what
they need of memory whatever the routing is, and the choice among them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from interpreted import SHARED, compiled, run

from kvline_server.kernels import cuda_experts
from kvline_server.kernels.cuda_experts import TILES, TORCH, ExpertGemms, candidates, most_tiles
from kvline_server.kernels.experts import Given, Layer, Routing
from kvline_server.kernels.tuning import Choices, parse, texts

QWEN = 128, 8  # experts, chosen


SCRIPT = """
import itertools
import torch
from dataclasses import replace
from interpreted import launcher
from torch.nn.functional import silu
from kvline_server.kernels import cuda_experts, torch_experts, triton_experts
from kvline_server.kernels.cuda_experts import TILES, TORCH, ExpertGemms
from kvline_server.kernels.experts import Given, Layer, Routing
from kvline_server.kernels.routing import Played

cuda_experts.launch = launcher(triton_experts)
empty, new_empty = torch.empty, torch.Tensor.new_empty

def broken(made):  # what is not written shows
    return made.fill_(float("nan") if made.is_floating_point() else -(1 << 20))

torch.empty = lambda *a, **k: broken(empty(*a, **k))
torch.Tensor.new_empty = lambda *a, **k: broken(new_empty(*a, **k))
torch.empty_like = lambda x: broken(empty(x.shape, dtype=x.dtype))

def activate(both, activation):
    if activation == "relu2":
        return both.relu().square()
    assert activation == "silu"
    gate, up = both.chunk(2, dim=1)
    return silu(gate) * up

gemms = ExpertGemms({}, activate)

SILU, SQUARED = Routing(0, True, "silu"), Routing(0, True, "relu2", "sigmoid", 2.5)

def check(experts, chosen, rows, hidden, width, real=None, renormalise=True, played=0, how=SILU):
    torch.manual_seed(rows)
    real = rows if real is None else real
    x = torch.randn(rows, hidden)
    x[real:] = float("nan")
    how = replace(how, chosen=chosen, renormalise=renormalise)
    ups = 1 if how.activation == "relu2" else 2
    gate_up = torch.randn(experts * ups * width, hidden) / hidden**0.5
    bias = torch.rand(experts) if how.scores == "sigmoid" else None
    down = torch.randn(experts * hidden, width) / width**0.5
    layer = Layer(gate_up, down, choice_bias=bias)
    # None so near to another that rounding chooses between them; each row has other weights.
    logits = (torch.rand(rows, experts) + 0.1).cumsum(dim=1) / 2 - 1
    logits = logits.gather(1, torch.rand(rows, experts).argsort(dim=1))
    asked = torch_experts.played(logits[:real], chosen, Played(played))
    routes = torch_experts._routes(asked, layer, how, Played(played))
    want = torch_experts.run(x[:real], routes, layer, lambda both: activate(both, how.activation))
    on_device = torch.tensor([real, played], dtype=torch.int32)
    ways = Given(real, Played(played)), Given(rows, on_device=on_device)
    for choice, way in next(PAIRS) if real == rows or rows > 9 else EVERY:
        got = gemms.run(x, logits, layer, how, ways[way], choice=choice)
        torch.testing.assert_close(got[:real], want, rtol=1e-4, atol=1e-4)
        assert (got[real:] == 0).all(), "padding"

# Each kernel of the GEMMs, with either way to say how many rows are real: all pairs once, and where
# some of few rows are padding; else by turns, since only the routing knows of the rows.
LAST = len(TILES) - 1
TURNS = ((TORCH, 0), (0, 1), (LAST, 0)), ((TORCH, 1), (0, 0), (LAST, 1))
EVERY = (*TURNS[0], *TURNS[1])
PAIRS = itertools.chain([EVERY], itertools.cycle(TURNS))
"""
# Each is a test: as one they computed for a minute, and beside two other programs past its limit.
CHECKS = {
    "rows": """
for rows in (1, 9, 40):
    check(6, 2, rows, 80, 48)
check(6, 1, 9, 80, 48, renormalise=False)
check(6, 6, 9, 80, 48)
check(130, 8, 20, 32, 16)  # more experts than the smaller variant has
check(128, 8, 4, 144, 32)  # each pair is a tile
check(128, 8, 5, 32, 16)  # and here not
check(64, 2, 7, 32, 16, real=3)
check(64, 2, 8, 32, 16, real=5)
check(64, 2, 7, 32, 16, real=0)
check(6, 2, 20, 32, 48, real=17)
""",
    "scores": """
for played in (Played.UNEQUAL, Played.EVEN):
    check(6, 2, 17, 32, 48, played=played)
    check(7, 3, 9, 32, 16, real=5, played=played)
    check(128, 8, 3, 32, 16, real=2, played=played)
    check(7, 3, 9, 32, 16, real=5, played=played, how=SQUARED)
# Scores by themselves, a bias of the choice, experts without a gate; more of a row than 16.
for rows, renormalise in ((1, True), (9, False), (40, True)):
    check(6, 2, rows, 80, 48, renormalise=renormalise, how=SQUARED)
check(128, 6, 4, 144, 32, how=SQUARED)
check(200, 22, 12, 32, 16, how=SQUARED)
check(60, 22, 3, 32, 16, real=2)
""",
    "every-tile": """
PAIRS = iter([[(choice, 0) for choice in range(TORCH, len(TILES))]])
check(2, 1, 70, 144, 80)

# Of equal logits the first experts are chosen. A NaN or an infinity breaks its own row alone.
logits = torch.zeros(4, 9)
logits[1, 3], logits[2, 8] = float("nan"), float("inf")
how, given = Routing(3, True, "silu"), Given(4)
pairs = cuda_experts.routed(logits, how, given, 16)
assert pairs.counts[:9].sum() == 12 and pairs.order[pairs.places[0]] == 0
sorted_ids = torch.repeat_interleave(torch.arange(9), pairs.counts[:9])
assert sorted_ids[pairs.places.long()].view(4, 3)[[0, 3]].tolist() == [[0, 1, 2]] * 2
assert pairs.weights.view(4, 3)[[0, 3]].allclose(torch.tensor(1 / 3))
x, gate_up, down = torch.randn(4, 32), torch.randn(9 * 32, 32), torch.randn(9 * 32, 16)
for choice in (TORCH, 0):
    got = gemms.run(x, logits, Layer(gate_up, down), how, given, choice=choice)
    assert got[[0, 3]].isfinite().all() and got[[1, 2]].isnan().all()
""",
    "far": """
# An expert behind 2^31 weights; the memory of those before it is never touched. In half precision
# for its size: the interpreter multiplies no bfloat16.
half = torch.float16
cuda_experts.TRITON_TYPES[half] = "fp16"
shapes, last = ((131 * 2048, 8192), (131 * 8192, 1024)), 130
gate_up, down = (empty(shape, dtype=half) for shape in shapes)
assert gate_up[: last * 2048].numel() > 1 << 31
layer = gate_up[last * 2048 :].normal_().div_(90), down[last * 8192 :].normal_().div_(32)
x, logits = (torch.randn(1, n).to(half) for n in (8192, 131))
logits[0, last] = 99
want = activate(x.float() @ layer[0].float().t(), "silu") @ layer[1].float().t()
for choice in (0, len(TILES) - 1):
    how = Routing(1, True, "silu")
    got = gemms.run(x, logits, Layer(gate_up, down), how, Given(1), choice=choice)
    assert (got - want).norm() < 1e-3 * want.norm()
""",
}


@pytest.mark.kernels
@pytest.mark.parametrize("checks", CHECKS.values(), ids=CHECKS)
def test_the_gpu_s_kernels_are_the_reference_s(checks: str) -> None:
    """In Triton's interpreter, with what is promised of alignment checked, and what is read before
    it was written shown: rows alone and many, evenly to experts and all to one, more experts than
    pairs, padding that is no number, widths that no block divides."""
    run(SCRIPT + checks)


@pytest.mark.kernels
def test_every_variant_compiles_and_fits_a_processor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, made in compiled(cuda_experts.variants(torch.bfloat16), monkeypatch):
        assert made.shared <= SHARED, name


@pytest.mark.parametrize("rows", [16, 128])
@pytest.mark.parametrize("experts", [8, 128])
def test_tiles_suffice_for_any_routing(rows: int, experts: int) -> None:
    """The bound is reached where every expert has one pair more than whole tiles."""
    for pairs in (1, 7, experts, 16 * experts, 16 * experts + 5):
        bound = most_tiles(pairs, experts, rows)
        for some in {1, 2, experts // 2, experts}:
            counts = torch.full((some,), pairs // some)
            counts[: pairs % some] += 1
            assert int((counts + rows - 1).div(rows, rounding_mode="floor").sum()) <= bound
    assert most_tiles(experts * (rows + 1), experts, rows) == 2 * experts
    assert most_tiles(3, experts, rows) == 3


def test_a_step_takes_the_same_memory_whatever_the_routing_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every size on the host follows from the numbers of rows, experts and columns."""
    taken: list[tuple[int, ...]] = []
    programs: list[int] = []
    empty = torch.Tensor.new_empty

    def counted(x: torch.Tensor, *size: tuple[int, int]) -> torch.Tensor:
        taken.append(*size)
        return empty(x, *size)

    monkeypatch.setattr(torch.Tensor, "new_empty", counted)
    monkeypatch.setattr(cuda_experts, "launch", lambda _, count, *words: programs.append(count))
    x, layer = torch.empty(8192, 2048, device="meta"), layer_of(*QWEN[:1], 2048, 768)
    logits = torch.empty(8192, 128, device="meta")
    how = Routing(8, True, "silu")
    ExpertGemms({}, lambda x, _: x).run(x, logits, layer, how, Given(8192))
    assert taken == [(65536, 768), (65536, 2048)]
    assert sum(2 * rows * columns for rows, columns in taken) == 352 << 20
    assert programs[0] == 8192 and len(programs) == 5


def layer_of(experts: int, hidden: int, width: int) -> Layer:
    shapes = (experts * 2 * width, hidden), (experts * hidden, width)
    first, last = (torch.empty(shape, device="meta") for shape in shapes)
    return Layer(first, last)


@pytest.mark.parametrize(
    ("needs", "why"),
    [
        ((513, 8, 2048, 768), "8 of 513 experts a token, kernels support at most 32 of 512"),
        ((128, 33, 2048, 768), "33 of 128 experts"),
        ((128, 8, 2048, 200), "200 columns and hidden size 2048, .* multiples of 16"),
        ((128, 8, 2056, 768), "hidden size 2056"),
    ],
)
def test_a_mixture_that_no_kernel_computes_is_named(
    needs: tuple[int, int, int, int], why: str
) -> None:
    cuda_experts.check(128, 8, 2048, 768)
    cuda_experts.check(8, 2, 4096, 14336)
    with pytest.raises(RuntimeError, match=why):
        cuda_experts.check(*needs)


def test_the_trial_chooses_and_other_row_counts_take_the_nearest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = layer_of(128, 64, 32)
    fastest = {1: 0, 64: 2, 8192: TORCH}
    tried: dict[int, list[int]] = {}

    def run(
        self: ExpertGemms, x: torch.Tensor, *words: object, choice: int | None = None
    ) -> torch.Tensor:
        assert choice is not None
        tried.setdefault(len(x), []).append(choice)
        return x

    def replay_time(work: Callable[[int], None], count: int, best_yet: float) -> float:
        work(count)
        (rows, choices) = list(tried.items())[-1]
        return 1.0 if choices[-1] == fastest[rows] else 2.0

    monkeypatch.setattr(ExpertGemms, "run", run)
    monkeypatch.setattr(torch.Tensor, "normal_", lambda x: x)
    choices: Choices = {(1, 64, 64): -2}
    made, how = ExpertGemms(choices, lambda x, _: x), Routing(8, True, "silu")
    made.tune([layer] * 5, how, [*fastest], None, replay_time)
    shape = (128 * 2 * 32, 64)
    found = {(rows, *shape): choice for rows, choice in fastest.items()}
    assert choices == {(1, 64, 64): -2} | found
    assert tried[1][:3] == [TORCH] * 3, "no more than three layers"
    assert [made.choice(rows, 8, layer) for rows in (1, 4, 48, 512, 4096)] == [0, 0, 2, 2, TORCH]

    again: Choices = {}
    other = ExpertGemms(again, lambda x, _: x)
    known = parse(texts(choices | {(2, *shape): len(TILES), (64, 7, 7): 1}))
    other.tune([layer], how, [1], known, replay_time)
    assert again == found, "neither an unknown tile nor another model's"


def test_without_a_trial_a_tile_fits_what_an_expert_has() -> None:
    made, layer = ExpertGemms({}, lambda x, _: x), layer_of(128, 64, 32)
    rows = [TILES[made.choice(count, 8, layer)].rows for count in (1, 64, 256, 2048, 8192)]
    assert rows == [32, 32, 32, 128, 128]
    for pairs in (1, 500, 2048, 70_000):
        assert candidates(pairs, 128)
