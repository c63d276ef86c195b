"""gpt-oss' checkpoints with experts in MXFP4, packed here, and those of the weights that they stand
for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # of E2M1, without a sign
CONFIG: dict[str, Any] = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
PACKED = ("experts.gate_up_proj", "experts.down_proj")


def packed(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[..., rows, columns] -> blocks uint8 [..., rows, columns / 32, 16], scales uint8 [..., rows,
    columns / 32], and what both stand for"""
    cut = weight.reshape(*weight.shape[:-1], -1, 32)
    largest = cut.abs().amax(dim=-1, keepdim=True).clamp(min=2.0**-100)
    exponents = largest.log2().floor() - 2  # 6 is 1.5 times 2 to the power of 2
    scaled = cut / exponents.exp2()
    ids = (scaled.abs().unsqueeze(-1) - NUMBERS).abs().argmin(dim=-1)
    signed = ids + 8 * (scaled < 0)
    blocks = (signed[..., ::2] + 16 * signed[..., 1::2]).to(torch.uint8)
    scales = (exponents.squeeze(-1) + 127).to(torch.uint8)
    numbers = NUMBERS[ids] * torch.where(scaled < 0, -1.0, 1.0) * exponents.exp2()
    return blocks, scales, numbers.flatten(-2)


def checkpoints(source: Path, into: Path) -> tuple[Path, Path]:
    """A model's folder with experts in MXFP4, and one of the weights that they stand for."""
    folders = into / "mxfp4", into / "plain"
    tensors = load_file(source / "model.safetensors")
    small, plain = dict(tensors), dict(tensors)
    for name in tensors:
        if name.endswith(PACKED):
            blocks, scales, numbers = packed(small.pop(name).transpose(1, 2))
            small |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            plain[name] = numbers.transpose(1, 2).contiguous()
    for folder, made in zip(folders, (small, plain), strict=True):
        shutil.copytree(source, folder)
        save_file(made, folder / "model.safetensors")
    change(folders[0], quantization_config=CONFIG)
    return folders


def change(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
