"""Opens a model's tokenizer and chat template; an error names the invalid file."""

from __future__ import annotations

import json
from pathlib import Path

from kvline_contract.launch import ToolCallParser
from kvline_server.errors import ModelInvalid
from kvline_server.http.chat_tokens import ChatTokens
from kvline_server.http.template_files import read_chat_files
from kvline_server.http.tokens import MAX_TEXT, Tokens

FILES = ("tokenizer_config.json", "special_tokens_map.json", "tokenizer.json")


def open_tokens(folder: Path, max_text: int = MAX_TEXT) -> Tokens | None:
    """For texts of `max_text` bytes. None where the model has no tokenizer: then requests need
    token ids. Raises ModelInvalid."""
    if not (folder / "tokenizer.json").is_file():
        return None
    try:
        return Tokens(folder, max_text)
    except Exception as error:  # tokenizers raises no class of its own
        raise ModelInvalid(_describe(folder, error)) from None


def open_chat(
    folder: Path,
    tokens: Tokens | None,
    processes: int = 1,
    parser: ToolCallParser | None = None,
) -> ChatTokens | None:
    """A template that is invalid costs chat, and ends no start. `parser`: of tool calls, instead of
    the one that the template shows. Raises ModelInvalid."""
    if tokens is None:
        return None
    try:
        files = read_chat_files(folder)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ModelInvalid(_describe(folder, error)) from None
    return ChatTokens(tokens, files, processes, parser=parser)


def _describe(folder: Path, error: Exception) -> str:
    """Names the invalid file. Parsing costs memory, so this runs only after an error."""
    for name in FILES:
        path = folder / name
        try:
            if path.is_file() and not isinstance(json.loads(path.read_text("utf-8")), dict):
                return f"{path}: expected a JSON object"
        except OSError as failed:
            return f"{path}: {failed.strerror}"
        except ValueError as failed:
            return f"{path}: truncated, or not JSON: {str(failed)[:200]}"
    return f"{folder / 'tokenizer.json'}: {str(error)[:200]}"
