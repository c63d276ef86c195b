"""SmolLM2 with heads that two ranks divide: 12 attention heads and 4 key-value heads for its 9 and
3. The added ones are zero in every projection, so it answers as SmolLM2 does.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

HEADS, KV_HEADS = 12, 4
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
COPIED = ("generation_config.json", *TOKENIZER)


def write(source: Path, folder: Path) -> Path:
    """A model's folder from SmolLM2's."""
    import torch
    from safetensors.torch import load_file, save_file

    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    wide = {"q_proj": HEADS, "k_proj": KV_HEADS, "v_proj": KV_HEADS}
    size = config["head_dim"]
    tensors = load_file(source / "model.safetensors")
    for name, weight in tensors.items():
        projection = name.split(".")[-2]
        rows, columns = weight.shape if weight.dim() == 2 else (0, 0)
        if projection in wide:
            rows = wide[projection] * size
        elif projection == "o_proj":
            columns = HEADS * size
        else:
            continue
        padded = torch.zeros(rows, columns, dtype=weight.dtype)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        tensors[name] = padded
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    (folder / "config.json").write_text(json.dumps(config))
    for name in COPIED:
        shutil.copy(source / name, folder / name)
    readable(folder)
    return folder


def readable(folder: Path) -> None:
    """By pods, which are of another user."""
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
