"""Experts in MXFP4 on a GPU: our kernel against a float64 oracle in the shapes of both gpt-oss, and
in captured graphs."""

from __future__ import annotations

import pytest
import torch
from test_experts import OFF, Mixture, distance, no_memory_left

from kvline_server.kernels import cuda_mxfp4
from kvline_server.kernels.cuda_mxfp4 import TILES, Mxfp4Gemms, packed
from kvline_server.kernels.experts import Given, Layer, Routing
from kvline_server.kernels.mxfp4 import Mxfp4Weight

pytestmark = pytest.mark.gpu
__all__ = ["no_memory_left"]  # a fixture of all tests


class InFourBits(Mixture):
    def layers(self, down_bias: bool = True) -> tuple[Layer, Layer]:
        """As published, and as the kernel reads it."""
        torch.manual_seed(0)
        e, h, w = self.experts, self.hidden, self.width
        gate_up, down = weight(e * 2 * w, h), weight(e * h, w)
        first, last = (torch.randn((e, n), device="cuda", dtype=torch.bfloat16) for n in (2 * w, h))
        biases = (first, last if down_bias else None)
        packs = packed(gate_up), packed(down)
        return Layer(gate_up, down, *biases), Layer(*packs, *biases)

    @property
    def routing(self) -> Routing:
        return Routing(self.chosen, True, "swiglu_oai")


OF_20B, OF_120B = InFourBits(32, 4, 2880, 2880), InFourBits(128, 4, 2880, 2880)
OF_TWO_RANKS = InFourBits(32, 4, 2880, 1440)
ODD = InFourBits(7, 3, 544, 224)  # neither is a whole number of the kernel's units


def weight(rows: int, inputs: int) -> Mxfp4Weight:
    """About as large as trained ones, for which the activation's limits count."""
    values, scales = (
        torch.randint(*bounds, (rows, columns), dtype=torch.uint8, device="cuda")
        for bounds, columns in (((0, 256), inputs // 2), ((117, 123), inputs // 32))
    )
    return Mxfp4Weight(values, scales)


def oracle(x: torch.Tensor, logits: torch.Tensor, layer: Layer, chosen: int) -> torch.Tensor:
    """In float64, an expert at a time; of equal logits the first experts."""
    shares, ids = logits.double().sort(dim=-1, descending=True, stable=True)
    ids, shares = ids[:, :chosen], shares[:, :chosen].softmax(dim=-1)
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    experts, hidden = layer.experts, x.shape[1]
    width = layer.down.shape[1]
    assert isinstance(layer.gate_up, Mxfp4Weight) and isinstance(layer.down, Mxfp4Weight)
    assert layer.gate_up_bias is not None
    for expert in range(experts):
        row, turn = (ids == expert).nonzero(as_tuple=True)
        if not len(row):
            continue
        first = layer.gate_up[expert * 2 * width : (expert + 1) * 2 * width].dequantised()
        last = layer.down[expert * hidden : (expert + 1) * hidden].dequantised()
        both = x[row].double() @ first.double().t() + layer.gate_up_bias[expert].double()
        gate, up = both.chunk(2, dim=1)
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        made = (gate * torch.sigmoid(1.702 * gate) * (up + 1)) @ last.double().t()
        if layer.down_bias is not None:
            made += layer.down_bias[expert].double()
        out.index_add_(0, row, made * shares[row, turn].unsqueeze(1))
    return out


@pytest.mark.parametrize(
    ("mixture", "counts"),
    [
        (OF_20B, (1, 2, 8, 64, 300, 4096)),
        (OF_120B, (1, 8, 256, 2048)),
        (OF_TWO_RANKS, (1, 64, 1024)),
        (ODD, (1, 2, 33, 777)),
    ],
    ids=["20b", "120b", "of-two-ranks", "odd"],
)
@torch.inference_mode()
def test_every_tile_is_near_to_float64(mixture: InFourBits, counts: tuple[int, ...]) -> None:
    """Also those that no trial would take for the row count."""
    published, layer = mixture.layers()
    gemms = Mxfp4Gemms({}, lambda x, _: x)
    for rows in counts:
        x, logits = mixture.inputs(rows)
        want = oracle(x, logits, published, mixture.chosen)
        found = {
            choice: distance(
                gemms.run(x, logits, layer, mixture.routing, Given(rows), choice=choice), want
            )
            for choice in range(len(TILES))
        }
        assert max(found.values()) < OFF, (rows, found)


@torch.inference_mode()
def test_a_rank_without_the_biases_of_down_adds_none() -> None:
    published, layer = ODD.layers(down_bias=False)
    x, logits = ODD.inputs(40)
    want = oracle(x, logits, published, ODD.chosen)
    for choice in range(len(TILES)):
        gemms = Mxfp4Gemms({}, lambda x, _: x)
        got = gemms.run(x, logits, layer, ODD.routing, Given(40), choice=choice)
        assert distance(got, want) < OFF, choice


@torch.inference_mode()
def test_a_captured_graph_follows_its_rows_and_ignores_padding() -> None:
    published, layer = OF_20B.layers()
    x, logits = OF_20B.inputs(64)
    on_device = torch.tensor([64, 0], dtype=torch.int32, device="cuda")
    given, out = Given(64, on_device=on_device), torch.empty_like(x)
    gemms = Mxfp4Gemms({}, lambda x, _: x)

    def work() -> None:
        gemms.run(x, logits, layer, OF_20B.routing, given, out, choice=0)

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for rows in (64, 17, 1):
        x.normal_()
        x[rows:] = float("nan")
        logits.normal_()
        on_device[0] = rows
        graph.replay()
        want = oracle(x[:rows], logits[:rows], published, OF_20B.chosen)
        assert distance(out[:rows], want) < OFF, rows
        assert (out[rows:] == 0).all(), rows


def test_packing_in_parts_takes_little_memory_and_is_that_of_a_cpu() -> None:
    """Gate and up of a layer of 20b, read and packed three experts' halves at a time, as the loader
    does."""
    rows, inputs, step = 32 * 5760, 2880, 3 * 2880
    into = cuda_mxfp4.packing(rows, inputs, torch.device("cuda"))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for at in range(0, rows, step):
        some = weight(min(step, rows - at), inputs)
        cuda_mxfp4.pack(into, some, at)
    assert torch.cuda.max_memory_allocated() - before < 256 << 20
    last = packed(Mxfp4Weight(some.values.cpu(), some.scales.cpu()))
    assert torch.equal(into.values[-len(last.values) :].cpu(), last.values)
    assert torch.equal(into.scales[-len(last.scales) :].cpu(), last.scales)
