"""Weights that stay in fp8, and their GEMM in plain torch: the reference for the tests and for
the trials of kernels.

Inputs are quantised as the checkpoints were made for: dynamically, with a scale of each row, or of
each 128 columns of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

FP8 = torch.float8_e4m3fn
BLOCK = 128  # rows and columns of a weight's block, and columns of an input's
ALIGN = 16  # of the numbers of inputs and outputs, for all kernels
WIDEST = 1 << 16  # inputs whose largest number one program finds
LARGEST = 448.0  # of e4m3
LEAST = 1e-10  # what the largest number of those with a common scale counts as, at least


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """[out, in], of which value times scale is the weight."""

    values: torch.Tensor  # float8_e4m3fn [out, in], contiguous
    # float32 [out, 1], or of blocks [ceil(out / 128), ceil(in / 128)] or padded to more columns
    scales: torch.Tensor
    blocks: bool

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def __len__(self) -> int:
        return len(self.values)

    def last(self, rows: int) -> Fp8Weight:
        """Its last rows, as many or some more: they begin with a block."""
        start = max(0, len(self) - rows) // BLOCK * BLOCK
        scales = self.scales[start // BLOCK if self.blocks else start :]
        return Fp8Weight(self.values[start:], scales, self.blocks)

    def dequantised(self) -> torch.Tensor:
        """float32 [out, in]"""
        scales = self.scales
        if self.blocks:
            scales = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            scales = scales[: len(self), : self.shape[1]]
        return self.values.float() * scales


Weight = torch.Tensor | Fp8Weight  # [out, in]


def fits(outputs: int, inputs: int) -> bool:
    """Whether kernels take such a weight of this shape."""
    return outputs % ALIGN == inputs % ALIGN == 0 and inputs <= WIDEST


def quantised(x: torch.Tensor, blocks: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, in] -> float8_e4m3fn [rows, in], float32 [rows, 1 or ceil(in / 128)]"""
    rows, inputs = x.shape
    width = BLOCK if blocks else inputs
    groups = pad(x.float(), (0, -inputs % width)).view(rows, -1, width)
    scales = groups.abs().amax(dim=2).clamp_(min=LEAST).div_(LARGEST)
    values = (groups / scales.unsqueeze(2)).view(rows, -1)[:, :inputs]
    return values.to(FP8), scales


def linear(x: torch.Tensor, weight: Fp8Weight) -> torch.Tensor:
    """x [rows, in], quantised, times the weight transposed. -> float32 [rows, out]"""
    values, scales = quantised(x, weight.blocks)
    wide = scales.repeat_interleave(BLOCK, 1)[:, : x.shape[1]] if weight.blocks else scales
    return (values.float() * wide) @ weight.dequantised().t()
