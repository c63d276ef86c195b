"""How far pixels that are resized by torchvision are from those by Pillow, which a server's equal.

transformers has a processor of each kind, and its users mostly the first one. It needs torchvision
0.26.0 beside this torch, which is no dependency of this project.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
from image_files import gradient, noise, text
from record import record, table

QWEN3 = {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
QWEN3 |= {"size": {"longest_edge": 16777216, "shortest_edge": 65536}}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3-vl": ("qwen2_vl", "Qwen2VL", QWEN3),
    "qwen2.5-vl": ("qwen2_vl", "Qwen2VL", {"min_pixels": 3136, "max_pixels": 12845056}),
    "gemma3": ("gemma3", "Gemma3", {"size": {"height": 896, "width": 896}, "resample": 2}),
}
PICTURES = {"noise": noise, "text": text, "gradient": gradient}
SIZES = [(80, 112), (333, 250), (700, 1000), (2000, 1500)]


def run() -> None:
    if find_spec("torchvision") is None:
        raise SystemExit("python bench image-pixels: install torchvision 0.26.0 beside torch")
    rows = []
    for name, kind in KINDS.items():
        pillow, torchvision = (_processor(*kind, by) for by in ("pil_", ""))
        for what, draw in PICTURES.items():
            found = [_steps(pillow, torchvision, draw(*size)) for size in SIZES]
            steps = np.concatenate(found)
            shares = [f"{100 * (steps > least).mean():.2f}" for least in (0.5, 1.5, 8.5)]
            rows.append([name, what, f"{steps.max():.0f}", f"{steps.mean():.3f}", *shares])
            most = float(steps.max())
            record(f"pixels-torchvision-{name}-{what}", most, "1/255", (most, most))
    head = ["processor", "picture", "most", "mean", "% differ", "% by 2 or more", "% by 9 or more"]
    table("torchvision's pixels from Pillow's, in 1/255", head, rows)


def _processor(module: str, kind: str, given: dict[str, Any], by: str) -> Any:
    import transformers.models as models

    home = getattr(getattr(models, module), f"image_processing_{by}{module}")
    return getattr(home, f"{kind}ImageProcessor{'Pil' if by else ''}")(**given)


def _steps(pillow: Any, torchvision: Any, image: Any) -> Any:
    """Of each number, by which the two differ."""
    one, other = (
        np.asarray(made(image)["pixel_values"], np.float64) for made in (pillow, torchvision)
    )
    std = np.mean(pillow.image_std)
    return (np.abs(one - other) * 255 * std).round(3).ravel()
