"""A layer's experts, in the shape of Qwen3-30B-A3B or another model: microseconds with all that is
around the two GEMMs, those of the GEMMs alone, and the experts' weights read a second; by torch's
grouped GEMMs and by our tiles, in MXFP4 by ours alone. Three layers' weights take turns, so they
come from memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import offline
import torch
from reads import BANDWIDTH
from record import record, table
from shapes import SHAPES

from kvline_server.kernels.cuda_experts import (
    LAYERS,
    ExpertGemms,
    ReplayTime,
    routed,
)
from kvline_server.kernels.cuda_mxfp4 import ACTIVATION, Mxfp4Gemms, packed
from kvline_server.kernels.experts import Given, Layer, Routing
from kvline_server.kernels.mxfp4 import Mxfp4Weight

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

    choice: str
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

    gpu = torch.cuda.get_device_name(0)
    for name in offline.models("qwen30b"):
        shape, rows = SHAPES[name], []
        many = shape.experts
        assert many is not None
        # In bfloat16 there are no kernels of it, nor of biases: the GEMMs are the same.
        plain = shape.activation == ACTIVATION and not many.mxfp4
        activation = "silu" if plain else shape.activation
        routing = Routing(many.chosen, many.renormalise, activation)
        kernels = FlashInferKernels(shape.heads, shape.kv_heads, shape.head_dim)
        kind = Mxfp4Gemms if many.mxfp4 else ExpertGemms
        gemms, make = kind({}, kernels.rows.activate_and_mul), mxfp4 if many.mxfp4 else weights
        layers = [make(many.count, shape.hidden, shape.intermediate) for _ in range(LAYERS)]
        for played, made in ROUTINGS.items():
            for count in ROWS:
                logits = made(count, many.count, many.chosen).to("cuda", torch.bfloat16)
                timings = measured(gemms, layers, routing, logits, replay_time)
                if played == KEPT:
                    keep(name, count, timings, gpu)
                rows += [[played, str(count), *cells] for cells in shown(timings)]
                print(*rows[-len(timings) :], sep="\n", flush=True)
        head = ["routing", "rows", "kernels", "us", "of the first's", "GEMMs us", "GB/s", "share"]
        title = f"Experts of a layer of {name}; share: of {BANDWIDTH / 1e12:.1f} TB/s"
        table(title, [*head, ""], rows)


def weights(experts: int, hidden: int, width: int) -> Layer:
    shapes = (experts * 2 * width, hidden), (experts * hidden, width)
    first, last = (torch.randn(each, device="cuda", dtype=torch.bfloat16) for each in shapes)
    return Layer(first.div_(hidden**0.5), last.div_(width**0.5))


def mxfp4(experts: int, hidden: int, width: int) -> Layer:
    """With biases, as gpt-oss has them."""
    sizes = (experts * 2 * width, hidden), (experts * hidden, width)
    first, last = (
        packed(
            Mxfp4Weight(
                torch.randint(256, (rows, inputs // 2), device="cuda").to(torch.uint8),
                torch.randint(118, 122, (rows, inputs // 32), device="cuda").to(torch.uint8),
            )
        )
        for rows, inputs in sizes
    )
    biases = (torch.randn((experts, n), device="cuda") for n in (2 * width, hidden))
    return Layer(first, last, *(each.to(torch.bfloat16) for each in biases))


@torch.inference_mode()
def measured(
    gemms: ExpertGemms,
    layers: list[Layer],
    routing: Routing,
    logits: torch.Tensor,
    replay_time: ReplayTime,
) -> list[Timing]:
    """Of every choice that a start would try for so many rows, torch's first where it is one."""
    hidden = layers[0].gate_up.shape[1]
    x = torch.randn((len(logits), hidden), device=logits.device).to(logits.dtype)
    met = len(set(logits.topk(routing.chosen).indices.flatten().tolist()))
    read = met * published(layers[0]) // logits.shape[1]

    def both(choice: int) -> float:
        pairs = routed(logits, routing, Given(len(x)), gemms.tile_rows(choice))

        def work(count: int) -> None:
            for layer in layers[:count]:
                gemms.both(x, layer, pairs, routing.activation, choice)

        return replay_time(work, len(layers), math.inf)

    whole = gemms.times(layers, routing, logits, replay_time)
    return [Timing(gemms.named(choice), took, both(choice), read) for choice, took in whole.items()]


def published(layer: Layer) -> int:
    """Bytes of the weights, without biases and what packing adds."""
    weights = (layer.gate_up, layer.down)
    return sum(
        each.nbytes if isinstance(each, torch.Tensor) else each.shape.numel() * 17 // 32
        for each in weights
    )


def best(timings: list[Timing]) -> Timing:
    """The one that a start would choose."""
    return min(timings, key=lambda timing: timing.whole)


def keep(name: str, count: int, timings: list[Timing], gpu: str) -> None:
    if timings[0].choice != "torch":
        floor = BANDWIDTH / best(timings).rate
        label = "mxfp4-floor" if name == "gptoss20b" else f"mxfp4-floor-{name}"
        record(f"{label}-{count}", floor, "ratio", (floor, floor), gpu)
        return
    of = "" if name == "qwen30b" else f"-{name}"
    for label, timing in (
        (f"grouped-us{of}", best(timings)),
        (f"grouped-us-torch{of}", timings[0]),
    ):
        record(f"{label}-{count}", timing.both, "us", (timing.both,) * 2, gpu)


def shown(timings: list[Timing]) -> list[list[str]]:
    fastest, first = best(timings), timings[0]
    return [
        [
            one.choice,
            f"{one.whole:.1f}",
            f"{one.whole / first.whole:.3f}",
            f"{one.both:.1f}",
            f"{one.rate / 1e9:.0f}",
            f"{one.rate / BANDWIDTH:.2f}",
            "best" if one is fastest else "",
        ]
        for one in timings
    ]
