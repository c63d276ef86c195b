"""The tower of images of Qwen3-VL-8B on a GPU: milliseconds of a whole pass and of its attention
alone, what passes take, and the kernels that take most."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
import vision_models
from attention import milliseconds
from busy import busy
from images_cpu import MIB, tower_of
from record import record, table

from kvline_server.kernels.interface import Kernels
from kvline_server.model.loader import RandomSource
from kvline_server.model.vision.tower import Tower

QWEN8B = tower_of(4096)
# Images of so many pixels a side.
PASSES = {"4096": [1024], "16x1024": [512] * 16, "64x256": [256] * 64, "16384": [2048]}


def run() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("python bench tower: it is a GPU's, and CUDA finds none here")
    from kvline_server.kernels.flashinfer import FlashInferKernels

    kernels = FlashInferKernels(32, 8, 128)
    tower = vision_models.load(RandomSource(), QWEN8B, kernels)
    rows, top, gpu = [], [], torch.cuda.get_device_name(0)
    for name, sides in PASSES.items():
        whole, alone, taken = one(kernels, tower, sides)
        times = milliseconds(whole)
        middle, attention = median(times), median(milliseconds(alone))
        record(f"tower-ms-{name}", middle, "ms", (times[0], times[-1]), gpu)
        spread = f"{times[0]:.2f} to {times[-1]:.2f}"
        rows.append([name, f"{middle:.2f}", spread, f"{attention:.2f}", f"{taken:.0f}"])
        print(rows[-1], flush=True)
        top += [[name, *each] for each in busy(whole)[1]]
    head = ["patches", "ms", "spread", "attention ms", "MiB"]
    table(f"{QWEN8B.layers} layers; MiB beyond those of passes before", head, rows)
    table("GPU time by kernel", ["patches", "kernel", "seconds", "%"], top)


@torch.inference_mode()
def one(
    kernels: Kernels, tower: Tower, sides: list[int]
) -> tuple[Callable[[], object], Callable[[], object], float]:
    """-> a pass, the attention of all its layers, and MiB that it added to what passes keep"""
    pictures = [torch.from_numpy(vision_models.picture(n, n)).to(kernels.device) for n in sides]
    lengths = [(side // QWEN8B.patch) ** 2 for side in sides]
    shape = sum(lengths), 3 * QWEN8B.heads * QWEN8B.head_dim
    qkv = torch.randn(shape, device=kernels.device).to(kernels.dtype)
    plan = kernels.encoder.plan(lengths, QWEN8B.heads, QWEN8B.head_dim)

    @torch.inference_mode()
    def whole() -> None:
        with kernels.encoder.memory():
            tower.begin(kernels, pictures, vision_models.BY).run(QWEN8B.layers)

    @torch.inference_mode()
    def attention() -> None:
        for _ in range(QWEN8B.layers):
            kernels.encoder.attend(qkv, plan, None)

    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    whole()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return whole, attention, (torch.cuda.memory_reserved() - before) / MIB
