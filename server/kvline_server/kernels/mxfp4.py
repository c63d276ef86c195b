"""Weights that stay in MXFP4: numbers of 4 bits (E2M1), and a power of two for each 32 of a row
(E8M0). Source: OCP Microscaling Formats (MX) Specification 1.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

BLOCK = 32  # numbers of a row with a common scale
# E2M1's numbers without a sign, which is the fourth bit.
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BIAS = 127  # of a scale's exponent
NAN = 255  # in the place of a scale


@dataclass(frozen=True, slots=True)
class Mxfp4Weight:
    """[out, in], of which number times scale is the weight."""

    values: torch.Tensor  # uint8 [out, in / 2], two numbers each, the first in the low four bits
    scales: torch.Tensor  # uint8 [out, in / 32]: 2 to the power of it less BIAS

    @property
    def shape(self) -> torch.Size:
        rows, bytes = self.values.shape
        return torch.Size((rows, 2 * bytes))

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: slice) -> Mxfp4Weight:
        return Mxfp4Weight(self.values[rows], self.scales[rows])

    def dequantised(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[out, in]; exact in bfloat16 too, but for what its exponents do not reach."""
        pairs = _pairs(self.values.device)
        found = pairs.index_select(0, self.values.flatten().int())  # both numbers of a byte
        numbers = found.view(torch.float32).view(len(self), -1, BLOCK)
        scales = torch.exp2(self.scales.float() - BIAS)
        return numbers.mul_(scales.unsqueeze(-1)).view(self.shape).to(dtype)


@dataclass(frozen=True, slots=True)
class PackedMxfp4:
    """[out, in], as our kernel reads it (cuda_mxfp4.pack)."""

    values: torch.Tensor  # int16 [out / 32, units, 32 rows, 32]
    scales: torch.Tensor  # int32 [out / 32, units, 32 rows], four exponents each
    shape: torch.Size

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes


@dataclass(frozen=True, slots=True)
class Packing:
    """Room for a weight in the kernels' layout, which is filled part by part."""

    made: PackedMxfp4
    # Rows of the weight, which are those from a row on; both are multiples of 32.
    put: Callable[[Mxfp4Weight, int], None]


@functools.cache
def _pairs(device: torch.device) -> torch.Tensor:
    """The two numbers of each byte, float32, as the bytes of an int64: [256]"""
    table, ids = torch.tensor((*NUMBERS, *(-n for n in NUMBERS))), torch.arange(256)
    return torch.stack((table[ids & 15], table[ids >> 4]), dim=1).view(torch.int64)[:, 0].to(device)
