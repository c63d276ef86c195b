"""GEMMs by shape: torch's kernel against cuBLASLt's algorithms and tinygemm, or with fp8 weights
against our tiles, and at one row our own kernel with the norm, the activation or the sum that
stands beside the GEMM. KVLINE_BENCH_MODELS selects shapes."""

from __future__ import annotations

import math
import time
from typing import Any

import offline
import torch
from record import table
from shapes import SHAPES

from kvline_server.kernels import fp8_linear
from kvline_server.kernels.bf16_linear import TINY, TORCH
from kvline_server.kernels.formats import Formats, replay_time
from kvline_server.kernels.fp8 import FP8, Fp8Weight, Weight
from kvline_server.kernels.fp8_linear import SCALED, TILED, TILES
from kvline_server.kernels.linears import Linears
from kvline_server.kernels.projection import Norm, Operand
from kvline_server.model.config import ModelConfig

ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
LAYERS = 6
ROUTER = "router"  # at one row it runs as a GEMM too


def weights(shape: ModelConfig) -> dict[str, tuple[int, int]]:
    """Of the GEMMs of all rows; those of experts are in experts.py."""
    heads = shape.heads * shape.head_dim
    both = heads + 2 * shape.kv_heads * shape.head_dim
    attention = {"qkv": (both, shape.hidden), "output": (shape.hidden, heads)}
    if shape.experts is not None:
        return attention | {ROUTER: (shape.experts.count, shape.hidden)}
    return attention | {
        "gate, up": (2 * shape.intermediate, shape.hidden),
        "down": (shape.hidden, shape.intermediate),
    }


def run() -> None:
    rows = []
    formats = Formats(torch.device("cuda", 0))
    for name, shape in ((name, SHAPES[name]) for name in offline.models()):
        total = 0.0
        for gemm, (out, inner) in weights(shape).items():
            held = [weight(shape, out, inner) for _ in range(LAYERS)]
            for count in ROWS:
                began = time.perf_counter()
                timing = formats.time_shape(held, count)
                total += (took := time.perf_counter() - began)
                which = named(timing.choice)
                figures = [f"{timing.torch:.1f}", f"{timing.best:.1f}"]
                ratio = f"{timing.best / timing.torch:.3f}"
                alone = count == 1 and gemm != ROUTER
                fused = f"{one_row(formats.of(held[0]), gemm, held):.1f}" if alone else ""
                rows.append([name, gemm, str(count), *figures, ratio, which, f"{took:.2f}", fused])
            del held
        print(f"{name}: tuned in {total:.1f} s", flush=True)
    head = ["model", "GEMM", "rows", "torch us", "best us", "ratio", "which", "seconds", "fused us"]
    table("GEMMs, one layer's, in a captured graph", head, rows)


def weight(shape: ModelConfig, out: int, inner: int) -> Weight:
    drawn = torch.randn((out, inner), device="cuda", dtype=torch.bfloat16)
    how = shape.quantization
    if how is None:
        return drawn
    scales = torch.rand(how.scales((out, inner)), device="cuda")
    return fp8_linear.pack(Fp8Weight(drawn.mul_(40).to(FP8), scales, how.block is not None))


def named(choice: int) -> str:
    if choice <= TILED:
        tile = TILES[TILED - choice]
        return f"{tile.rows}x{tile.outputs}/{tile.splits}"
    return {TORCH: "torch", TINY: "tinygemm", SCALED: "torch"}.get(choice, str(choice))


@torch.inference_mode()
def one_row(linears: Linears[Any], gemm: str, weights: list[Weight]) -> float:
    """Microseconds of the kernel that a step of one request runs in place of the GEMM."""
    out, inner = weights[0].shape
    x, residual = (torch.randn((1, n), device="cuda", dtype=torch.bfloat16) for n in (inner, out))
    plain, normed = Operand(x), Operand(x, Norm(torch.ones_like(x[0]), 1e-5))

    def work(count: int) -> None:
        for weight in weights[:count]:
            if gemm in ("output", "down"):
                linears.row(plain, weight, None, residual, added=True)
            else:
                linears.row(normed, weight, gated=gemm == "gate, up")

    return replay_time(work, len(weights), math.inf)
