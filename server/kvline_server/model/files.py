"""The safetensors files of a model folder, without reading their data. Imports no torch itself, so
a check beside serving replicas takes little time and memory."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from kvline_server.errors import ModelInvalid, ModelNotFound
from kvline_server.model.fields import read_json

INDEX = "model.safetensors.index.json"
MAX_INDEX_BYTES = 32 << 20


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder, by its index if it has one."""
    if not folder.is_dir():
        raise ModelNotFound(f"{folder}: no such folder")
    index = folder / INDEX
    if index.is_file():
        table = read_json(index, MAX_INDEX_BYTES).get("weight_map")
        if not isinstance(table, dict) or not table:
            raise ModelInvalid(f"{index}: weight_map is missing or empty")
        names = sorted({str(name) for name in table.values()})
        for name in names:
            if Path(name).name != name:
                raise ModelInvalid(f"{index}: {name!r:.80} leaves the model folder")
            if not (folder / name).is_file():
                raise ModelInvalid(f"{folder / name}: listed in {INDEX}, but missing")
        return [folder / name for name in names]
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return files
    others = sorted(
        p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".gguf")
    )
    hint = f"; {others[0]} is of an unsupported format" if others else ""
    hint += "; spec.model.loadFormat: random needs none"
    raise ModelInvalid(f"{folder}: no .safetensors file{hint}")


def open_weights(path: Path, framework: str) -> Any:
    """A safetensors file whose header is valid; tensors are those of `framework`, pt or np. Raises
    ModelInvalid."""
    try:
        return safe_open(path, framework=framework, device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelInvalid(f"{path}: not a valid safetensors file: {error}") from None


def identity(folder: Path, with_weights: bool) -> str:
    """sha256 of config.json and every safetensors header: identifies a local model without reading
    its data."""
    digest = hashlib.sha256()
    with contextlib.suppress(FileNotFoundError):
        digest.update((folder / "config.json").read_bytes())
    for path in weight_files(folder) if with_weights else []:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            digest.update(json.dumps([path.name, length]).encode())
            digest.update(file.read(min(length, 1 << 26)))
    return digest.hexdigest()
