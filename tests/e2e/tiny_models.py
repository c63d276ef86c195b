"""Tiny models of random weights with SmolLM2's tokenizer, in claims of their own."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import even_heads
import model

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 49152,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}


def claim(
    space: Any,
    name: str,
    folder: Path,
    made: Any,
    files: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """The model as `tiny` in a claim of this name, of which `folder` is the volume; `files` are
    texts by their names, in the model's folder."""
    folder.chmod(0o755)
    own = folder / "tiny"
    made.save_pretrained(own)
    for each in even_heads.TOKENIZER:
        shutil.copy(model.MODEL / each, own / each)
    for each, text in files.items():
        (own / each).write_text(text)
    even_heads.readable(own)
    space.cluster.claim(space.name, folder, name)
