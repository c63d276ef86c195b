"""Mixtures of experts on a GPU: our kernels and torch's grouped GEMMs against a float64 oracle and
plain torch, in captured graphs whose routing changes, and models with experts in whole steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from pairs import engine as engine_of
from pairs import worker
from torch.nn.functional import silu

from kvline_server.kernels import torch_experts
from kvline_server.kernels.cuda_experts import TILES, TORCH, ExpertGemms, candidates
from kvline_server.kernels.experts import ExpertWeight, Given, Layer, Routing
from kvline_server.kernels.routing import Played
from kvline_server.kernels.row_counts import tried
from kvline_server.kernels.tuning import parse, texts
from kvline_server.model.config import Experts, ModelConfig

pytestmark = pytest.mark.gpu
OFF = 8e-3  # of the whole: bfloat16's rounding of what is between the two GEMMs, and of the sum
UNEVEN = 1.5  # more of it where one of a row's experts has most of the weight


@dataclass(frozen=True)
class Mixture:
    experts: int
    chosen: int
    hidden: int
    width: int

    def layer(self, seed: int = 0) -> Layer:
        torch.manual_seed(seed)
        shapes = (2 * self.width, self.hidden), (self.hidden, self.width)
        first, last = (
            torch.empty((self.experts * rows, inputs), device="cuda", dtype=torch.bfloat16)
            .normal_()
            .div_(inputs**0.5)
            for rows, inputs in shapes
        )
        return Layer(first, last)

    @property
    def routing(self) -> Routing:
        return Routing(self.chosen, True, "silu")

    def inputs(self, rows: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """x and the router's logits."""
        torch.manual_seed(seed)
        x, logits = (
            torch.randn((rows, n), device="cuda", dtype=torch.bfloat16)
            for n in (self.hidden, self.experts)
        )
        return x, logits


QWEN, MIXTRAL = Mixture(128, 8, 2048, 768), Mixture(8, 2, 4096, 14336)
OF_TWO_RANKS = Mixture(128, 8, 2048, 384)  # no whole number of the largest blocks
ODD = Mixture(19, 3, 528, 208)


def gemms() -> ExpertGemms:
    return ExpertGemms({}, activate)


def activate(both: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "relu2":
        return both.relu().square()
    assert activation == "silu"
    gate, up = both.chunk(2, dim=1)
    return silu(gate) * up


def oracle(x: torch.Tensor, logits: torch.Tensor, layer: Layer, chosen: int) -> torch.Tensor:
    """In float64, an expert at a time; of equal logits the first experts."""
    shares, ids = logits.double().softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    ids, shares = ids[:, :chosen], shares[:, :chosen]
    shares = shares / shares.sum(dim=-1, keepdim=True)
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    experts = logits.shape[1]
    weights = (layer.gate_up, layer.down)
    first, last = (dense(each).view(experts, -1, each.shape[1]) for each in weights)
    for expert in range(experts):
        row, turn = (ids == expert).nonzero(as_tuple=True)
        both = x[row].double() @ first[expert].double().t()
        made = activate(both, "silu") @ last[expert].double().t()
        out.index_add_(0, row, made * shares[row, turn].unsqueeze(1))
    return out


def dense(weight: ExpertWeight) -> torch.Tensor:
    assert isinstance(weight, torch.Tensor)
    return weight


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest of any row."""
    off = (got.double() - want.double()).norm(dim=1)
    return float((off / want.double().norm(dim=1)).max())


@pytest.fixture(autouse=True)
def no_memory_left() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize(
    ("mixture", "counts"),
    [
        (QWEN, (1, 3, 4, 5, 64, 256, 1000, 8192)),
        (MIXTRAL, (1, 2, 7, 256, 2048, 8192)),
        (OF_TWO_RANKS, (1, 64, 256, 2048)),
        (ODD, (1, 2, 33, 777)),
    ],
    ids=["qwen", "mixtral", "of-two-ranks", "odd"],
)
@torch.inference_mode()
def test_every_kernel_is_as_near_to_float64_as_torch_s(
    mixture: Mixture, counts: tuple[int, ...]
) -> None:
    """Also the tiles that no trial would take for the row count."""
    layer, made = mixture.layer(), gemms()
    for rows in counts:
        x, logits = mixture.inputs(rows)
        want = oracle(x, logits, layer, mixture.chosen)
        found = {
            choice: distance(
                made.run(x, logits, layer, mixture.routing, Given(rows), choice=choice), want
            )
            for choice in (TORCH, *range(len(TILES)))
        }
        assert max(found.values()) < OFF, (rows, found)


@torch.inference_mode()
def test_plain_torch_agrees_where_no_logits_are_equal() -> None:
    layer, mixture = QWEN.layer(), QWEN
    x, _ = mixture.inputs(300)
    logits = torch.randn((300, 128), device="cuda").argsort(dim=1).div(32).to(torch.bfloat16)
    routes = torch_experts.route(logits, mixture.chosen, True)
    want = torch_experts.run(x, routes, layer, lambda both: activate(both, "silu"))
    for choice in (TORCH, *candidates(300 * 8, 128)):
        got = gemms().run(x, logits, layer, mixture.routing, Given(300), choice=choice)
        assert distance(got, want) < 2 * OFF, choice


# Nemotron 3's experts: of Nano, and of the latent width of Super.
NANO, SUPER = Mixture(128, 6, 2688, 1856), Mixture(512, 22, 1024, 2688)


@pytest.mark.parametrize("mixture", [NANO, SUPER], ids=["nano", "super"])
@torch.inference_mode()
def test_experts_without_a_gate_that_a_biased_sigmoid_chooses(mixture: Mixture) -> None:
    """As plain torch, whichever kernels."""
    gated, count = mixture.layer(), mixture.experts
    assert isinstance(gated.gate_up, torch.Tensor)
    bias = torch.rand(count, device="cuda")
    layer = Layer(gated.gate_up[: count * mixture.width], gated.down, choice_bias=bias)
    routing = Routing(mixture.chosen, True, "relu2", "sigmoid", 2.5)
    for rows in (1, 2, 64, 300, 2048):
        x, logits = mixture.inputs(rows)
        routes = torch_experts._routes(logits, layer, routing, Played.NOTHING)
        want = torch_experts.run(x, routes, layer, lambda both: activate(both, "relu2"))
        for choice in (TORCH, *range(len(TILES))):
            got = gemms().run(x, logits, layer, routing, Given(rows), choice=choice)
            off = (got.double() - want.double()).norm(dim=1) / want.double().norm(dim=1)
            # Two experts of one row may be so near that the sigmoid's last bit chooses.
            assert float(off.median()) < 2 * OFF, (rows, choice)
            assert int((off > 2 * OFF).sum()) <= rows // 100, (rows, choice)


@pytest.mark.parametrize("rows", [4, 257])
@torch.inference_mode()
def test_the_same_rows_give_the_same_bits(rows: int) -> None:
    """Atomics hand out places in any order, and no number depends on it."""
    layer = QWEN.layer()
    x, logits = QWEN.inputs(rows)
    for choice in (TORCH, 0, 3, len(TILES) - 1):
        first, *others = (
            gemms().run(x, logits, layer, QWEN.routing, Given(rows), choice=choice)
            for _ in range(5)
        )
        assert all(torch.equal(first, other) for other in others), choice


def routings(rows: int) -> dict[str, torch.Tensor]:
    """Logits of Qwen's experts."""
    at = torch.arange(rows, device="cuda").unsqueeze(1)
    expert = torch.arange(128, device="cuda")
    made = {
        "one": -expert.expand(rows, 128),
        "even": -((expert - 8 * at) % 128),
        "other": -((expert + 40) % 128).expand(rows, 128),
        "random": torch.randn((rows, 128), device="cuda"),
    }
    return {name: logits.to(torch.bfloat16) for name, logits in made.items()}


@pytest.mark.parametrize("bucket", [4, 96, 512, 8192])
@torch.inference_mode()
def test_a_captured_graph_follows_each_replay_s_routing_and_rows(bucket: int) -> None:
    layer, routing = QWEN.layer(), QWEN.routing
    own, logits = QWEN.inputs(bucket)
    given = torch.tensor([bucket, 0], dtype=torch.int32, device="cuda")
    of_replay = Given(bucket, on_device=given)
    every = (TORCH, *candidates(bucket * 8, 128)) if bucket > 4 else (TORCH, 0, 1, 2)
    for choice in every:
        out = torch.empty_like(own)
        out.fill_(float("nan"))

        def work(choice: int = choice, out: torch.Tensor = out) -> None:
            gemms().run(own, logits, layer, routing, of_replay, out, choice=choice)

        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            work()
        asked_of = [(name, asked, Played.NOTHING) for name, asked in routings(bucket).items()]
        for how in (Played.UNEQUAL, Played.EVEN):
            asked_of.append((how.name, torch_experts.played(logits, 8, how), how))
        for turn, (name, asked, how) in enumerate(asked_of):
            real = max(1, bucket - turn * bucket // 7)
            x, _ = QWEN.inputs(bucket, seed=turn)
            own.copy_(x)
            own[real:] = float("nan")  # what an earlier, larger step left
            logits.copy_(routings(bucket)["random"] if how else asked)
            logits[real:] = float("nan")
            given[0], given[1] = real, how
            graph.replay()
            some = torch.randperm(real, device="cuda")[:300]
            want = oracle(x[some], asked[some], layer, 8)
            bound = OFF if name in ("even", "random") else UNEVEN * OFF
            assert distance(out[some], want) < bound, (choice, name)
            assert (out[real:] == 0).all(), (choice, name)


@torch.inference_mode()
def test_any_routing_takes_the_same_memory() -> None:
    rows, layer = 8192, QWEN.layer()
    x, _ = QWEN.inputs(rows)
    for choice, most in ((len(TILES) - 1, 352), (TORCH, 448)):
        peaks = set()
        for logits in routings(rows).values():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_stats()["requested_bytes.all.current"]
            gemms().run(x, logits, layer, QWEN.routing, Given(rows), choice=choice)
            peaks.add(torch.cuda.memory_stats()["requested_bytes.all.peak"] - before)
        assert len(peaks) == 1, (choice, peaks)
        # With the output, and the tables of pairs and tiles.
        assert max(peaks) < (most + 36) << 20, (choice, max(peaks) >> 20)


SMALL = Experts(16, 4, True, "mlp.")


def test_the_trial_is_taken_over_and_gives_what_torch_gives(
    shape: Callable[..., ModelConfig],
) -> None:
    model = shape(128, True, experts=SMALL, intermediate=256)
    done = worker(engine_of(model)).tune(1024, None)
    assert done is not None
    mine = {key: choice for key, choice in done.items() if key[1:] == (16 * 2 * 256, 512)}
    assert [rows for rows, *_ in sorted(mine)] == tried(1024)
    other = worker(engine_of(model))
    assert other.tune(1024, parse(texts(done))) == done
    kernels, first = other.kernels, other.decoder.experts()[0]
    for rows in (1, 3, 200, 1000):
        x = torch.randn((rows, 512), device="cuda", dtype=torch.bfloat16)
        logits = torch.randn((rows, 16), device="cuda", dtype=torch.bfloat16)
        got = kernels.experts.run(x, logits, first.layer, first.routing, Given(rows))
        assert distance(got, oracle(x, logits, first.layer, 4)) < OFF, rows


@pytest.mark.parametrize("rows", [4, 40])
@torch.inference_mode()
def test_a_row_that_is_not_finite_breaks_no_other(rows: int) -> None:
    """A GPU's maximum leaves a NaN out, and that of Triton's interpreter does not."""
    layer = QWEN.layer()
    x, logits = QWEN.inputs(rows)
    logits[1, 5], logits[2, 7], logits[3] = float("nan"), float("inf"), float("-inf")
    sound = [0, *range(4, rows)]
    want = oracle(x[sound], logits[sound], layer, QWEN.chosen)
    for choice in (TORCH, *candidates(rows * QWEN.chosen, QWEN.experts)):
        got = gemms().run(x, logits, layer, QWEN.routing, Given(rows), choice=choice)
        assert distance(got[sound], want) < OFF, choice
        assert got[1:4].isnan().all(), choice


@torch.inference_mode()
def test_an_expert_behind_2_to_the_31_weights_is_reached() -> None:
    far = Mixture(131, 1, 8192, 1024)
    layer = far.layer()
    x, logits = far.inputs(40)
    logits.fill_(0.0)[:, far.experts - 1] = 9.0
    want = oracle(x, logits, layer, far.chosen)
    for choice in (TORCH, 0, len(TILES) - 1):
        got = gemms().run(x, logits, layer, far.routing, Given(40), choice=choice)
        assert distance(got, want) < OFF, choice
