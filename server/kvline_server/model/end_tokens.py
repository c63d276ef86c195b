"""The tokens that end an answer: of config.json, generation_config.json and the tokenizer.

Chat fine-tunes of a base model often change only the last, and would then never end. Reads little
of tokenizer.json, which is tens of MiB: parsed, it would take ten times as much memory beside the
KV cache.
"""

from __future__ import annotations

import json
import mmap
import re
from pathlib import Path
from typing import Any, TypeGuard

from kvline_server.model.fields import Fields, read_json

ADDED = re.compile(rb'"added_tokens"\s*:\s*(?=\[)')
WINDOW = 1 << 20  # bytes of the list of added tokens that are tried first


def end_tokens(config: Fields, folder: Path, vocabulary: int) -> tuple[int, ...]:
    """Ids, each once. Raises ModelInvalid for what is no token of the vocabulary."""
    found = _given(config, vocabulary)
    generation = folder / "generation_config.json"
    if generation.is_file():
        found += _given(Fields(read_json(generation), generation), vocabulary)
    own = _of_tokenizer(folder)
    if own is not None and own < vocabulary:
        found.append(own)
    return tuple(dict.fromkeys(found))


def _given(fields: Fields, vocabulary: int) -> list[int]:
    value = fields.value("eos_token_id", [])
    ids = [id for id in (value if isinstance(value, list) else [value]) if id is not None]
    if not all(_is_id(id) and id < vocabulary for id in ids):
        raise fields.invalid("eos_token_id", f"a token id below {vocabulary}, a list of such")
    return ids


def token_text(value: Any) -> str:
    """Of a special token in a tokenizer's settings, which have it as a text or an object."""
    return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")


def _of_tokenizer(folder: Path) -> int | None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            settings = json.loads((folder / name).read_text("utf-8"))
            text = token_text(settings.get("eos_token"))
        except (OSError, ValueError, AttributeError):
            continue  # the HTTP process refuses a broken file by its name
        if text:
            return _id(folder / "tokenizer.json", text)
    return None


def _id(path: Path, text: str) -> int | None:
    """The token's id in a tokenizer's file: one of the added tokens, or of the vocabulary."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for token in _added(data):
                if isinstance(token, dict) and token.get("content") == text:
                    return token["id"] if _is_id(token.get("id")) else None
            key = re.escape(json.dumps(text, ensure_ascii=False).encode())
            found = re.search(rb"(?<!\\)" + key + rb"\s*:\s*(\d+)", data)
            return int(found[1]) if found else None
    except (OSError, ValueError):  # mmap: an empty file
        return None


def _added(data: mmap.mmap) -> list[Any]:
    found, size = ADDED.search(data), WINDOW
    while found:
        text = data[found.end() : found.end() + size].decode("utf-8", "ignore")
        try:
            return list(json.JSONDecoder().raw_decode(text)[0])
        except ValueError:  # cut off, or no JSON
            if found.end() + size >= len(data):
                break
            size *= 4
    return []


def _is_id(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
