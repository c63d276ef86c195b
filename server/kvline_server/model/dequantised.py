"""fp8 weights as what they stand for: multiplied by their scales as they are copied, where they are
not copied to fp8."""

from __future__ import annotations

import torch

from kvline_server.errors import ModelInvalid
from kvline_server.kernels.fp8 import FP8
from kvline_server.model.linear import Rows
from kvline_server.model.loader import SafetensorsSource
from kvline_server.model.quantization import FIELD, MXFP4_SCALES, MXFP4_VALUES, Quantization

E4M3, BYTES = "F8_E4M3", "U8"  # dtypes of safetensors


class Dequantised:
    """A TensorSource. Checks a weight's scales with it, so a missing or mis-shaped one ends the
    start by name."""

    def __init__(self, files: SafetensorsSource, quantization: Quantization | None) -> None:
        self.files = files
        self.quantization = quantization
        self.quantised: dict[str, int] = {}  # elements of each such weight
        self.kept: set[str] = set()  # of them, those that were copied as they are

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        self.files.check(name, shape)
        if name.endswith((MXFP4_VALUES, MXFP4_SCALES)) and self.files.dtype(name) != BYTES:
            raise ModelInvalid(
                f"{self.files.where[name]}: tensor {name} is {self.files.dtype(name)}, in MXFP4 it "
                f"must be {BYTES}"
            )
        if self.files.dtype(name) != E4M3:
            return
        if self.quantization is None:
            raise self._invalid(name, f"and config.json has no {FIELD}, which tells of its scales")
        if len(shape) != 2:
            raise self._invalid(name, "which only weights with rows and columns can be")
        self.files.check(name + self.quantization.suffix, self.quantization.scales(shape))
        self.quantised[name] = shape[0] * shape[1]

    def has(self, name: str) -> bool:
        return self.files.has(name)

    def count(self, prefix: str) -> int:
        return self.files.count(prefix)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.files.shape(name)

    def fp8(self, name: str) -> Quantization | None:
        there = name in self.files.where and self.files.dtype(name) == E4M3
        return self.quantization if there else None

    def copy(self, part: Rows, into: torch.Tensor, column: int = 0) -> None:
        if into.dtype == FP8:
            self.kept.add(part.name)
        if part.name not in self.quantised or into.dtype == FP8:
            self.files.copy(part, into, column)
            return
        assert self.quantization is not None
        numbers = torch.empty(into.shape, dtype=torch.float32)
        self.files.copy(part, numbers, column)
        rows, columns = (
            torch.arange(start, start + count)
            for start, count in zip((part.rows.start, column), into.shape, strict=True)
        )
        height, width = self.quantization.block or (1, self.files.shape(part.name)[1])
        scales = self.files.whole(part.name + self.quantization.suffix)
        some = scales[(rows // height).unsqueeze(1), (columns // width).unsqueeze(0)]
        into.copy_(numbers.mul_(some.float()))

    def _invalid(self, name: str, why: str) -> ModelInvalid:
        return ModelInvalid(f"{self.files.folder}: tensor {name} is fp8, {why}")
