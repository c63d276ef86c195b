"""Linears with weights in bfloat16 on a GPU: torch's GEMM, one of cuBLASLt's algorithms through
FlashInfer or its tinygemm for up to 8 rows, chosen by trial; a shape that was not tried uses torch.
One row's are in cuda_linear.py."""

from __future__ import annotations

from typing import Any

import torch
from flashinfer.gemm.gemm_base import get_mm_bf16_cublaslt_module
from flashinfer.gemm.routergemm import get_tinygemm2_module
from torch.nn import functional

from kvline_server.kernels import cuda_linear
from kvline_server.kernels.fp8_linear import SCALED
from kvline_server.kernels.linears import Linears
from kvline_server.kernels.projection import Operand
from kvline_server.kernels.tuning import Choices

WORKSPACE = 32 << 20  # bytes; cuBLAS's own default on Hopper
TINY_ROWS = 8  # tinygemm's tile
ALGORITHMS = 8  # first ones that cuBLASLt proposes; no later one was ever faster

# Other choices are indices of cuBLASLt algorithms; those for fp8 weights are in fp8_linear.py.
TORCH, TINY = -1, -2


class Bf16Linears(Linears[torch.Tensor]):
    """`choices` are those of all GEMMs."""

    gates = False

    def __init__(self, choices: Choices, device: torch.device) -> None:
        self.choices = choices
        self._workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        self._cublaslt: Any = get_mm_bf16_cublaslt_module().cublaslt_bf16_gemm_runner()
        self._tiny: Any = get_tinygemm2_module()

    def takes_row(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        return cuda_linear.fits(x, weight)

    def row(
        self,
        x: Operand,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        gated: bool = False,
        added: bool = False,
    ) -> torch.Tensor:
        return cuda_linear.one_row(x, weight, bias, out, gated, added)

    def rows(
        self,
        x: Operand,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        given = x.rows
        choice = self.choices.get((len(x), *weight.shape), TORCH) if bias is None else TORCH
        if choice != TORCH and choice > SCALED:  # another is of fp8 weights of the same shape
            made = given.new_empty((len(x), len(weight))) if out is None else out
            self.run(given, weight, made, choice)
            return made
        if out is None:
            return functional.linear(given, weight, bias)
        if bias is None:
            return torch.mm(given, weight.t(), out=out)
        return torch.addmm(bias, given, weight.t(), out=out)

    def candidates(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> list[int]:
        if len(x) <= TINY_ROWS:
            fits = weight.shape[0] % 16 == 0 and weight.shape[1] % 64 == 0
            return [TORCH, TINY] if fits else [TORCH]
        known = self._cublaslt.get_valid_tactics(self._inputs(x, weight, out), None)
        return [TORCH, *known[:ALGORITHMS]]

    def run(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, choice: int) -> None:
        if choice == TORCH:
            torch.mm(x, weight.t(), out=out)
        elif choice == TINY:
            self._tiny.tinygemm2_nobias_op(x, weight, out, False)
        else:
            self._cublaslt(inputs=self._inputs(x, weight, out), tactic=choice)

    def _inputs(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> list[Any]:
        return [x, weight.t(), None, False, out, self._workspace]
