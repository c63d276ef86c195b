"""Recurrent layers in the shapes of Qwen3.5-9B and Nemotron-H-8B: microseconds a layer with all
that is between its projections but the norm, and the time in which a copy moves the states that are
read and written. Layers take turns, so their states come from memory."""

from __future__ import annotations

import statistics

import numpy as np
import torch
from reads import BANDWIDTH
from record import record, table

from kvline_server.kernels.cuda_recurrent import CudaRecurrent
from kvline_server.kernels.recurrent import (
    DUMMY,
    Convolution,
    Decay,
    DeltaRule,
    Scan,
    Sequences,
    States,
)

LAYERS = 3
REPEATS = 4  # of all layers in a graph
REPLAYS = 20
DELTA_RULE = {
    "gdn-decode-us-1": (1, 1, True),
    "gdn-decode-us-64": (64, 1, True),
    "gdn-decode-us-256": (256, 1, True),
    "gdn-drafts-us-64x4": (64, 4, True),
    "gdn-prefill-us-one": (1, 8192, False),
    "gdn-prefill-us-16x512": (16, 512, False),
    "gdn-prefill-us-128x64": (128, 64, False),
    "gdn-prefill-us-512x16": (512, 16, False),
}
SCAN = {
    "ssd-decode-us-64": (64, 1, True),
    "ssd-decode-us-256": (256, 1, True),
    "ssd-prefill-us": (1, 8192, False),
    "ssd-prefill-us-16x512": (16, 512, False),
    "ssd-prefill-us-128x64": (128, 64, False),
}
# Sequences, rows of each, and whether they go on from a state.
Steps = dict[str, tuple[int, int, bool]]


def run() -> None:
    if not torch.cuda.is_available():
        raise SystemExit(
            "python bench recurrent: its kernels are a GPU's, and CUDA finds none here"
        )
    gpu, rows = torch.cuda.get_device_name(0), []
    kinds: tuple[tuple[DeltaRule | Scan, Steps], ...] = (delta_rule(), DELTA_RULE), (scan(), SCAN)
    for layer, steps in kinds:
        for name, (sequences, each, going_on) in steps.items():
            median, low, high = measured(layer, sequences, each, going_on)
            record(name, median, "us", (low, high), gpu)
            floor = 1e6 * sequences * (1 + going_on) * state_bytes(layer) / BANDWIDTH
            spread = f"{low:.1f} to {high:.1f}"
            rows.append([name, f"{median:.1f}", spread, f"{floor:.1f}", f"{floor / median:.2f}"])
            print(rows[-1], flush=True)
    head = ["figure", "us", "spread", "of states", "share"]
    table(f"Recurrent layers; states: at {BANDWIDTH / 1e12:.1f} TB/s", head, rows)


def delta_rule() -> DeltaRule:
    """Of Qwen3.5-9B."""
    weight = torch.randn((2 * 16 + 32) * 128, 4, device="cuda").to(torch.bfloat16)
    return DeltaRule(16, 32, 128, 128, Convolution(weight / 2), decay(32))


def scan() -> Scan:
    """Of Nemotron-H-8B."""
    channels = 128 * 64 + 2 * 8 * 128
    weight, bias = (
        torch.randn(shape, device="cuda").to(torch.bfloat16) / 2
        for shape in ((channels, 4), (channels,))
    )
    made = Convolution(weight, bias)
    return Scan(128, 64, 8, 128, made, decay(128), torch.randn(128, device="cuda"))


def decay(heads: int) -> Decay:
    spread = torch.linspace(-3, 1, heads, device="cuda")
    return Decay(spread, spread.flip(0))


def heads_of(layer: DeltaRule | Scan) -> tuple[int, int, int]:
    """Heads, and both dimensions of their states."""
    if isinstance(layer, DeltaRule):
        return layer.value_heads, layer.key_dim, layer.value_dim
    return layer.heads, layer.head_dim, layer.state_dim


def state_bytes(layer: DeltaRule | Scan) -> int:
    """Of a sequence's matrices."""
    heads, *dims = heads_of(layer)
    return heads * dims[0] * dims[1] * torch.float32.itemsize


def pool(layer: DeltaRule | Scan, slots: int) -> States:
    channels = len(layer.convolution.weight)
    inputs = torch.randn((slots, 3, channels), device="cuda").to(torch.bfloat16)
    return States(inputs, torch.randn((slots, *heads_of(layer)), device="cuda"))


@torch.inference_mode()
def measured(
    layer: DeltaRule | Scan, sequences: int, each: int, going_on: bool
) -> tuple[float, float, float]:
    """Microseconds a layer: median, lowest and highest of replays of a graph of all layers."""
    kernels = CudaRecurrent(torch.device("cuda"))
    slots = np.arange(1, sequences + 1)
    starts = np.arange(sequences + 1, dtype=np.int32) * each
    plan = kernels.plan(Sequences(starts, slots, slots if going_on else np.full_like(slots, DUMMY)))
    pools = [pool(layer, sequences + 1) for _ in range(LAYERS)]
    rows, channels = sequences * each, len(layer.convolution.weight)
    heads = heads_of(layer)[0]
    x = torch.randn((rows, channels), device="cuda").to(torch.bfloat16)
    gates = torch.randn((rows, 2 * heads), device="cuda").to(torch.bfloat16)

    def work() -> None:
        for states in pools:
            if isinstance(layer, DeltaRule):
                kernels.delta_rule(x, gates, layer, states, plan)
            else:
                kernels.scan(x, gates[:, :heads], layer, states, plan)

    work()
    torch.cuda.synchronize()
    graph, took = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            work()
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        took.append(1e3 * start.elapsed_time(end) / (LAYERS * REPEATS))
    return statistics.median(took), min(took), max(took)
