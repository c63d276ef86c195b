"""Checkpoints in fp8 of both formats, and kernels that keep them so, on the CPU."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kvline_server.kernels import fp8
from kvline_server.kernels.fp8 import Fp8Weight, Weight
from kvline_server.kernels.projection import Operand, Projection
from kvline_server.kernels.torch import TorchKernels
from kvline_server.kernels.torch_gemms import TorchGemms
from kvline_server.model.config import read_config
from kvline_server.model.dequantised import Dequantised
from kvline_server.model.loader import (
    SafetensorsSource,
    Weights,
    load_weights,
)
from kvline_server.model.shard import WHOLE, Shard

LARGEST = 448.0  # of e4m3
GROUP: dict[str, Any] = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False},
    "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
}
LINEARS = tuple(f"_proj{kind}.weight" for kind in ("", "_qkv", "_z", "_qkvz"))
CONFIGS: dict[str, dict[str, Any]] = {
    "channel": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": GROUP},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    },
    "block": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    },
}


def quantised(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> fp8, scales, what both stand for"""
    if kind == "channel":
        scales = weight.abs().amax(dim=1, keepdim=True) / LARGEST
        whole = scales
    else:
        rows, columns = ((n + 127) // 128 for n in weight.shape)
        scales = torch.zeros(rows, columns)
        for i in range(rows):
            for j in range(columns):
                block = weight[128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
                scales[i, j] = block.abs().max() / LARGEST
        whole = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        whole = whole[: len(weight), : weight.shape[1]]
    numbers = (weight / whole).to(torch.float8_e4m3fn)
    return numbers, scales, numbers.float() * whole


def checkpoints(kind: str, source: Path, into: Path) -> tuple[Path, Path]:
    """A model's folder in fp8, and one of the weights that it stands for."""
    folders = into / "fp8", into / "plain"
    tensors = load_file(source / "model.safetensors")
    small, plain = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if name.endswith(LINEARS):
            small[name], scales, plain[name] = quantised(weight, kind)
            suffix = "_scale" if kind == "channel" else "_scale_inv"
            small[name + suffix] = scales
    for folder, made in zip(folders, (small, plain), strict=True):
        shutil.copytree(source, folder)
        save_file(made, folder / "model.safetensors")
    change(folders[0], CONFIGS[kind])
    return folders


def change(folder: Path, quantization: dict[str, Any] | None) -> None:
    file = folder / "config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization})
    )


class _PlainGemms(TorchGemms):
    def pack(self, weight: Weight) -> Weight:
        return weight


class _KeepingGemms(_PlainGemms):
    keeps_fp8 = True

    def linear(
        self, x: Operand, projection: Projection, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        weight, bias = projection.weight, projection.bias
        if not isinstance(weight, Fp8Weight):
            return super().linear(x, projection, out)
        made = fp8.linear(self.settle(x), weight) + (0 if bias is None else bias)
        return made if out is None else out.copy_(made)


class Plain(TorchKernels):
    """Weights stay in the layout in which they are loaded."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype)
        self.gemms = _PlainGemms(self.device, dtype, self.rows, self.group)


class Keeping(TorchKernels):
    """As a GPU's: fp8 weights stay in fp8, and inputs are quantised for them."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype)
        self.gemms = _KeepingGemms(self.device, dtype, self.rows, self.group)


def loaded(
    folder: Path,
    shard: Shard = WHOLE,
    kernels: TorchKernels | None = None,
    heard: list[tuple[int, int]] | None = None,
) -> Weights:
    config = read_config(folder)
    source = Dequantised(SafetensorsSource(folder), config.quantization)
    calls = [] if heard is None else heard
    kernels = kernels or Plain()
    return load_weights(source, config, kernels, lambda *at: calls.append(at), shard)


def projections(weights: Weights) -> list[Projection]:
    layers = weights.layers
    every = [(*a.mixer.projections, *a.blocks[0].projections) for a in layers]
    return [projection for layer in every for projection in layer]


def dequantised(projection: Projection) -> torch.Tensor:
    made = projection.weight
    return made.dequantised() if isinstance(made, Fp8Weight) else made
