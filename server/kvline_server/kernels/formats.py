"""The formats of weights on a GPU: of each its kernels, among which trials at the start choose for
each shape.

Candidates are timed for some of the row counts of captured graphs, each as it will run: in a
captured graph, over the weights of several layers, so that weights come from memory and not from
the L2 cache that the run before filled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvline_server.kernels.bf16_linear import TORCH, Bf16Linears
from kvline_server.kernels.fp8 import Fp8Weight, Weight
from kvline_server.kernels.fp8_linear import Fp8Linears
from kvline_server.kernels.linears import Linears
from kvline_server.kernels.tuning import Choices, Shape

# Weights to cycle through; large inputs evict the cache anyway.
LAYERS, LARGE_LAYERS, LARGE_ROWS = 6, 2, 512
REPLAYS = 2
GIVE_UP = 1.1  # times the best so far: no further replay
GAIN = 0.98  # of the first one's time; a smaller gain is within run-to-run noise


@dataclass(frozen=True, slots=True)
class Timing:
    """The result for one shape; times in microseconds."""

    shape: Shape
    torch: float  # for fp8 weights of the first candidate
    best: float
    choice: int


class Formats:
    def __init__(self, device: torch.device) -> None:
        self.choices: Choices = {}
        self.device = device
        self.bf16 = Bf16Linears(self.choices, device)
        self.fp8 = Fp8Linears(self.choices)
        self.every: tuple[Linears[Any], ...] = self.bf16, self.fp8

    def of(self, weight: Weight) -> Linears[Any]:
        """Those of its format, which no other module of kernels looks at."""
        return self.fp8 if isinstance(weight, Fp8Weight) else self.bf16

    def tune(self, weights: Sequence[Sequence[Weight]], rows: list[int]) -> None:
        """Times all GEMMs of a layer, of each of which `weights` has every layer's, at these row
        counts."""
        kinds = self._kinds(weights)
        for count in rows:
            for layers in kinds:
                self.time_shape(layers, count)

    @torch.inference_mode()
    def take(self, weights: Sequence[Sequence[Weight]], known: Choices) -> None:
        """Takes choices that were measured elsewhere, but for kernels that are not there."""
        for weight in (layers[0] for layers in self._kinds(weights)):
            outputs, inputs = weight.shape
            for (rows, *shape), choice in known.items():
                if shape == [outputs, inputs]:
                    x = self._rows(rows, inputs)
                    out = x.new_empty((rows, outputs))
                    if choice in self.of(weight).candidates(x, weight, out):
                        self.choices[rows, outputs, inputs] = choice
        self._tuned()

    @torch.inference_mode()
    def time_shape(self, weights: Sequence[Weight], rows: int) -> Timing:
        """Times all candidates for GEMMs of `rows` rows with weights of one format and shape, one
        per layer, and keeps the best. Raises torch.OutOfMemoryError, or RuntimeError where no
        kernel gives what it should."""
        weights = weights[: LARGE_LAYERS if rows >= LARGE_ROWS else LAYERS]
        one = weights[0]
        linears = self.of(one)
        x = self._rows(rows, one.shape[1]).normal_()
        out = x.new_empty((rows, len(one)))
        candidates = linears.right(x, one, out, linears.candidates(x, one, out))
        times: dict[int, float] = {}
        for choice in candidates:

            def work(count: int, choice: int = choice) -> None:
                for weight in weights[:count]:
                    linears.run(x, weight, out, choice)

            best_yet = min(times.values(), default=math.inf)
            times[choice] = replay_time(work, len(weights), best_yet)
        first, best = candidates[0], min(times, key=lambda choice: times[choice])
        if times[best] > GAIN * times[first]:
            best = first
        shape = (rows, *one.shape)
        if best != TORCH:
            self.choices[shape] = best
            self._tuned()
        return Timing(shape, times[first], times[best], best)

    def _kinds(self, weights: Sequence[Sequence[Weight]]) -> list[list[Weight]]:
        """A list per GEMM and format of its weights."""
        kinds = [
            [weight for weight in layers if self.of(weight) is linears]
            for layers in weights
            for linears in self.every
        ]
        return [kind for kind in kinds if kind]

    def _rows(self, rows: int, columns: int) -> torch.Tensor:
        return torch.empty((rows, columns), dtype=torch.bfloat16, device=self.device)

    def _tuned(self) -> None:
        for linears in self.every:
            linears.tuned()


def replay_time(work: Callable[[int], None], count: int, best_yet: float) -> float:
    """Microseconds per GEMM of a captured graph of `count` GEMMs: the best of REPLAYS replays, or
    the first where that is far above `best_yet`."""
    work(1)  # lazy initialisation is not allowed in a capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work(count)
    best = math.inf
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, 1e3 * start.elapsed_time(end) / count)
        if best > GIVE_UP * best_yet:
            break
    return best
