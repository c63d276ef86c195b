"""What experts in MXFP4 cost on a CPU, which dequantises them in every step: a layer in the shape
of gpt-oss-20b with eight experts, of the same in float32."""

from __future__ import annotations

import time

import torch
from record import record, table
from shapes import SHAPES

from kvline_server.kernels.experts import Given, Layer, Routing
from kvline_server.kernels.mxfp4 import Mxfp4Weight
from kvline_server.kernels.torch_experts import TorchExperts
from kvline_server.kernels.torch_rows import TorchRows

EXPERTS, CHOSEN = 8, 4
ROWS, ROUNDS = (1, 64, 512), 3


@torch.inference_mode()
def run() -> None:
    shape, found = SHAPES["gptoss20b"], TorchExperts(TorchRows())
    hidden, width = shape.hidden, shape.intermediate
    gate_up, down = weight(EXPERTS * 2 * width, hidden), weight(EXPERTS * hidden, width)
    biases = torch.randn((EXPERTS, 2 * width)), torch.randn((EXPERTS, hidden))
    layers = {
        "MXFP4": Layer(gate_up, down, *biases),
        "float32": Layer(gate_up.dequantised(), down.dequantised(), *biases),
    }
    routing, rows = Routing(CHOSEN, True, shape.activation), []
    for count in ROWS:
        x, logits = torch.randn((count, hidden)), torch.randn((count, EXPERTS))
        took: dict[str, list[float]] = {name: [] for name in layers}
        for _ in range(ROUNDS):
            for name, layer in layers.items():
                began = time.perf_counter()
                found.run(x, logits, layer, routing, Given(count))
                took[name].append(1e3 * (time.perf_counter() - began))
        best = {name: min(times) for name, times in took.items()}
        ratio = best["MXFP4"] / best["float32"]
        record(f"dequantise-ratio-{count}", ratio, "ratio", (ratio, ratio))
        rows.append([str(count), *(f"{ms:.0f}" for ms in best.values()), f"{ratio:.1f}"])
    title = f"A layer's experts on {torch.get_num_threads()} threads, ms, best of {ROUNDS}"
    table(title, ["rows", *layers, "ratio"], rows)


def weight(rows: int, inputs: int) -> Mxfp4Weight:
    return Mxfp4Weight(
        torch.randint(256, (rows, inputs // 2), dtype=torch.uint8),
        torch.randint(118, 122, (rows, inputs // 32), dtype=torch.uint8),
    )
