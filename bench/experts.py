"""A layer's experts, in the shape of Qwen3-30B-A3B, by torch's grouped GEMMs and by our tiles:
microseconds with all that is around the two GEMMs, those of the GEMMs alone, and the experts'
weights read a second. Three layers' weights take turns, so they come from memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from reads import BANDWIDTH
from record import record, table
from shapes import SHAPES

from kvline_server.kernels.cuda_experts import (
    LAYERS,
    TILES,
    TORCH,
    ExpertGemms,
    ReplayTime,
    routed,
)
from kvline_server.kernels.experts import Given, Layer, Routing

MODEL = "qwen30b"
ROWS = (1, 8, 64, 256, 1024, 8192)
Logits = Callable[[int, int, int], torch.Tensor]  # of rows, experts, chosen; [rows, experts]
KEPT = "random"  # the routing of the recorded figures
ROUTINGS: dict[str, Logits] = {
    KEPT: lambda rows, experts, _: torch.randn((rows, experts)),
    "even": lambda rows, experts, chosen: (
        -((torch.arange(experts) - chosen * torch.arange(rows).unsqueeze(1)) % experts)
    ),
    "most unequal": lambda rows, experts, _: -torch.arange(experts).expand(rows, experts),
}


@dataclass(frozen=True, slots=True)
class Timing:
    """Of a choice of cuda_experts, for one layer."""

    choice: int
    whole: float  # microseconds: routing, both GEMMs, the sum of each row's experts
    both: float  # of the GEMMs with the activation, and of torch's with gathering the rows
    read: int  # bytes of the chosen experts' weights

    @property
    def rate(self) -> float:
        """Bytes of weights a second, of the GEMMs."""
        return 1e6 * self.read / self.both


def run() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("python bench experts: its kernels are a GPU's, and CUDA finds none here")
    from kvline_server.kernels.flashinfer import FlashInferKernels
    from kvline_server.kernels.formats import replay_time

    shape, gpu = SHAPES[MODEL], torch.cuda.get_device_name(0)
    many = shape.experts
    assert many is not None
    routing = Routing(many.chosen, many.renormalise, shape.activation)
    kernels = FlashInferKernels(shape.heads, shape.kv_heads, shape.head_dim)
    gemms = ExpertGemms({}, kernels.rows.activate_and_mul)
    layers = [weights(many.count, shape.hidden, shape.intermediate) for _ in range(LAYERS)]
    rows = []
    for kind, made in ROUTINGS.items():
        for count in ROWS:
            logits = made(count, many.count, many.chosen).to("cuda", torch.bfloat16)
            timings = measured(gemms, layers, routing, logits, replay_time)
            if kind == KEPT:
                keep(count, timings, gpu)
            rows += [[kind, str(count), *cells] for cells in shown(timings)]
            print(*rows[-len(timings) :], sep="\n", flush=True)
    head = ["routing", "rows", "kernels", "us", "of torch's", "GEMMs us", "GB/s", "share", ""]
    title = f"Experts of a layer of {MODEL}; share: of {BANDWIDTH / 1e12:.1f} TB/s"
    table(title, head, rows)


def weights(experts: int, hidden: int, width: int) -> Layer:
    shapes = (experts * 2 * width, hidden), (experts * hidden, width)
    first, last = (torch.randn(each, device="cuda", dtype=torch.bfloat16) for each in shapes)
    return Layer(first.div_(hidden**0.5), last.div_(width**0.5))


@torch.inference_mode()
def measured(
    gemms: ExpertGemms,
    layers: list[Layer],
    routing: Routing,
    logits: torch.Tensor,
    replay_time: ReplayTime,
) -> list[Timing]:
    """Of every choice that a start would try for so many rows, torch's first."""
    hidden = layers[0].gate_up.shape[1]
    x = torch.randn((len(logits), hidden), device=logits.device).to(logits.dtype)
    met = len(set(logits.topk(routing.chosen).indices.flatten().tolist()))
    read = met * layers[0].nbytes // logits.shape[1]

    def both(choice: int) -> float:
        pairs = routed(logits, routing, Given(len(x)), gemms.tile_rows(choice))

        def work(count: int) -> None:
            for layer in layers[:count]:
                gemms.both(x, layer, pairs, routing.activation, choice)

        return replay_time(work, len(layers), math.inf)

    whole = gemms.times(layers, routing, logits, replay_time)
    return [Timing(choice, took, both(choice), read) for choice, took in whole.items()]


def best(timings: list[Timing]) -> Timing:
    """The one that a start would choose."""
    return min(timings, key=lambda timing: timing.whole)


def keep(count: int, timings: list[Timing], gpu: str) -> None:
    for name, timing in (("grouped-us", best(timings)), ("grouped-us-torch", timings[0])):
        record(f"{name}-{count}", timing.both, "us", (timing.both,) * 2, gpu)


def shown(timings: list[Timing]) -> list[list[str]]:
    fastest, first = best(timings), timings[0]
    return [
        [
            named(one.choice),
            f"{one.whole:.1f}",
            f"{one.whole / first.whole:.3f}",
            f"{one.both:.1f}",
            f"{one.rate / 1e9:.0f}",
            f"{one.rate / BANDWIDTH:.2f}",
            "best" if one is fastest else "",
        ]
        for one in timings
    ]


def named(choice: int) -> str:
    if choice == TORCH:
        return "torch"
    tile = TILES[choice]
    return f"{tile.rows}x{tile.outputs}x{tile.inputs}"
