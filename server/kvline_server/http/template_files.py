"""Which chat template a model's folder has, and the special tokens that it may name: pure reading,
as transformers reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvline_server.model.end_tokens import token_text

MORE = "additional_chat_templates"  # a folder of named ones
SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
# What a template has beside `chat_template_kwargs`: these may not replace it.
RESERVED = frozenset(
    {f"{name}_token" for name in SPECIAL}
    | {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
    | {"raise_exception", "strftime_now", "namespace", "dict", "range", "lipsum", "cycler"}
    | {"joiner", "self", "loop", "caller", "varargs", "kwargs"}
    | {"chat_template", "conversation", "tokenize", "padding", "truncation", "max_length"}
    | {"return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"}
)


@dataclass(frozen=True, slots=True)
class ChatFiles:
    template: str | None = None
    tool_template: str | None = None  # for requests with tools, where the model has another
    name: str = "default"
    problem: str = ""  # why there is none, where there are some
    variables: Mapping[str, str] = field(default_factory=dict)  # special tokens by name


def read_chat_files(folder: Path) -> ChatFiles:
    """Raises ValueError and OSError, as the files do."""
    settings = read_object(folder / "tokenizer_config.json")
    older = read_object(folder / "special_tokens_map.json")
    variables = {
        name: text
        for name in (f"{name}_token" for name in SPECIAL)
        if (text := token_text(settings.get(name) or older.get(name)))
    }
    try:
        named = _templates(folder, settings)
    except UnicodeDecodeError:
        return ChatFiles(problem="this model's chat template is not UTF-8", variables=variables)
    if "default" in named:
        return ChatFiles(named["default"], named.get("tool_use"), variables=variables)
    problem = f"of this model's chat templates ({', '.join(sorted(named))}) none is the default"
    return ChatFiles(problem=problem[:300] if named else "", variables=variables)


def _templates(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """By name; files before tokenizer_config.json, which has one, or several with names."""
    files = {path.stem: path for path in sorted((folder / MORE).glob("*.jinja"))}
    if (alone := folder / "chat_template.jinja").is_file():
        files["default"] = alone
    if files:
        return {name: path.read_text("utf-8") for name, path in files.items()}
    given = settings.get("chat_template")
    if isinstance(given, list):
        given = {
            entry.get("name"): entry.get("template") for entry in given if isinstance(entry, dict)
        }
    elif not isinstance(given, dict):
        given = {"default": given}
    return {str(name): text for name, text in given.items() if isinstance(text, str)}


def read_object(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text("utf-8"))) if path.is_file() else {}
