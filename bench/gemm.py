"""GEMMs by shape: torch's kernel against cuBLASLt's algorithms and tinygemm."""

from __future__ import annotations

import time

import torch
from record import table
from shapes import SHAPES

from kvline_server.kernels.gemm import TINY, TORCH, Gemms
from kvline_server.model.config import ModelConfig

ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
LAYERS = 6


def weights(shape: ModelConfig) -> dict[str, tuple[int, int]]:
    heads = shape.heads * shape.head_dim
    both = heads + 2 * shape.kv_heads * shape.head_dim
    return {
        "qkv": (both, shape.hidden),
        "output": (shape.hidden, heads),
        "gate, up": (2 * shape.intermediate, shape.hidden),
        "down": (shape.hidden, shape.intermediate),
    }


def run() -> None:
    rows = []
    gemms = Gemms(torch.device("cuda", 0))
    for name, shape in SHAPES.items():
        total = 0.0
        for gemm, (out, inner) in weights(shape).items():
            held = [
                torch.randn((out, inner), device="cuda", dtype=torch.bfloat16)
                for _ in range(LAYERS)
            ]
            for count in ROWS:
                began = time.perf_counter()
                timing = gemms.time_shape(held, count)
                total += (took := time.perf_counter() - began)
                which = {TORCH: "torch", TINY: "tinygemm"}.get(timing.choice, str(timing.choice))
                figures = [f"{timing.torch:.1f}", f"{timing.best:.1f}"]
                ratio = f"{timing.best / timing.torch:.3f}"
                rows.append([name, gemm, str(count), *figures, ratio, which, f"{took:.2f}"])
            del held
        print(f"{name}: tuned in {total:.1f} s", flush=True)
    head = ["model", "GEMM", "rows", "torch us", "best us", "ratio", "which", "seconds"]
    table("GEMMs, one layer's, in a captured graph", head, rows)
