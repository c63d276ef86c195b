"""GEMM autotuning: torch's kernel, or a faster one that was measured on this GPU at the start.

Candidates are cuBLASLt's algorithms through FlashInfer, and its tinygemm for up to 8 rows; they are
timed for some of the row counts of captured graphs, any other row count uses torch. Each candidate
is timed as it will run: in a captured graph, over the weights of several layers, so that weights
come from memory and not from the L2 cache that the run before filled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from flashinfer.gemm.gemm_base import get_mm_bf16_cublaslt_module
from flashinfer.gemm.routergemm import get_tinygemm2_module
from torch.nn import functional

from kvline_server.kernels import fp8_linear
from kvline_server.kernels.fp8 import Fp8Weight, Weight
from kvline_server.kernels.fp8_linear import SCALED, Fp8Linears
from kvline_server.kernels.tuning import Choices, Shape

WORKSPACE = 32 << 20  # bytes; cuBLAS's own default on Hopper
TINY_ROWS = 8  # tinygemm's tile
ALGORITHMS = 8  # first ones that cuBLASLt proposes; no later one was ever faster
# Weights to cycle through; large inputs evict the cache anyway.
LAYERS, LARGE_LAYERS, LARGE_ROWS = 6, 2, 512
REPLAYS = 2
GIVE_UP = 1.1  # times the best so far: no further replay
GAIN = 0.98  # of torch's time; a smaller gain is within run-to-run noise

# Other choices are indices of cuBLASLt algorithms; those for fp8 weights are in fp8_linear.py.
TORCH, TINY = -1, -2


@dataclass(frozen=True, slots=True)
class Timing:
    """The result for one shape; times in microseconds."""

    shape: Shape
    torch: float  # for fp8 weights of the first candidate
    best: float
    choice: int


class Gemms:
    def __init__(self, device: torch.device) -> None:
        self.choices: Choices = {}
        self.fp8 = Fp8Linears(self.choices)
        self._workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        self._cublaslt: Any = get_mm_bf16_cublaslt_module().cublaslt_bf16_gemm_runner()
        self._tiny: Any = get_tinygemm2_module()

    def linear(
        self,
        x: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        if isinstance(weight, Fp8Weight):
            return self.fp8.linear(x, weight, bias, out)
        choice = self.choices.get((len(x), *weight.shape), TORCH) if bias is None else TORCH
        if choice != TORCH and choice > SCALED:  # another is of fp8 weights of the same shape
            made = x.new_empty((len(x), len(weight))) if out is None else out
            self._run(x, weight, made, choice)
            return made
        if out is None:
            return functional.linear(x, weight, bias)
        if bias is None:
            return torch.mm(x, weight.t(), out=out)
        return torch.addmm(bias, x, weight.t(), out=out)

    def _run(self, x: torch.Tensor, weight: Weight, out: torch.Tensor, choice: int) -> None:
        if isinstance(weight, Fp8Weight):
            fp8_linear.run(x, weight, out, choice)
        elif choice == TORCH:
            torch.mm(x, weight.t(), out=out)
        elif choice == TINY:
            self._tiny.tinygemm2_nobias_op(x, weight, out, False)
        else:
            self._cublaslt(inputs=self._inputs(x, weight, out), tactic=choice)

    def _inputs(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> list[Any]:
        return [x, weight.t(), None, False, out, self._workspace]

    def candidates(self, x: torch.Tensor, weight: Weight, out: torch.Tensor) -> list[int]:
        if isinstance(weight, Fp8Weight):
            return fp8_linear.candidates(len(x), weight)
        if len(x) <= TINY_ROWS:
            fits = weight.shape[0] % 16 == 0 and weight.shape[1] % 64 == 0
            return [TORCH, TINY] if fits else [TORCH]
        known = self._cublaslt.get_valid_tactics(self._inputs(x, weight, out), None)
        return [TORCH, *known[:ALGORITHMS]]

    @torch.inference_mode()
    def take(self, weights: Sequence[Sequence[Weight]], known: Choices) -> None:
        """Takes choices that were measured elsewhere, but for kernels that are not there."""
        for weight in (layers[0] for layers in weights):
            outputs, inputs = weight.shape
            for (rows, *shape), choice in known.items():
                if shape == [outputs, inputs]:
                    x = _empty(weight, rows, inputs)
                    if choice in self.candidates(x, weight, x.new_empty((rows, outputs))):
                        self.choices[rows, outputs, inputs] = choice
        self.fp8.tuned()

    @torch.inference_mode()
    def time_shape(self, weights: Sequence[Weight], rows: int) -> Timing:
        """Times all candidates for GEMMs of `rows` rows with weights of one kind and shape, one per
        layer, and keeps the best. Raises torch.OutOfMemoryError, or RuntimeError where no kernel
        for fp8 weights gives what it should."""
        weights = weights[: LARGE_LAYERS if rows >= LARGE_ROWS else LAYERS]
        one = weights[0]
        x = _empty(one, rows, one.shape[1]).normal_()
        out = x.new_empty((rows, len(one)))
        candidates = self.candidates(x, one, out)
        if isinstance(one, Fp8Weight):
            candidates = fp8_linear.right(x, one, out, candidates)
        times: dict[int, float] = {}
        for choice in candidates:

            def work(count: int, choice: int = choice) -> None:
                for weight in weights[:count]:
                    self._run(x, weight, out, choice)

            best_yet = min(times.values(), default=math.inf)
            times[choice] = replay_time(work, len(weights), best_yet)
        first, best = candidates[0], min(times, key=lambda choice: times[choice])
        if times[best] > GAIN * times[first]:
            best = first
        shape = (rows, *one.shape)
        if best != TORCH:
            self.choices[shape] = best
            self.fp8.tuned()
        return Timing(shape, times[first], times[best], best)


def _empty(weight: Weight, rows: int, columns: int) -> torch.Tensor:
    """[rows, columns] for a GEMM with the weight."""
    like = weight.values if isinstance(weight, Fp8Weight) else weight
    return like.new_empty((rows, columns), dtype=torch.bfloat16)


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
