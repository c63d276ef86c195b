"""Opens a model's tokenizer and chat template; an error names the invalid file."""

from __future__ import annotations

import json
from pathlib import Path

from jinja2 import TemplateSyntaxError

from kvline_server.errors import ModelInvalid
from kvline_server.http.tokens import MAX_RENDERED, Tokens

FILES = ("tokenizer_config.json", "tokenizer.json")


def open_tokens(folder: Path, max_text: int = MAX_RENDERED) -> Tokens | None:
    """For texts of `max_text` bytes. None where the model has no tokenizer: then requests need
    token ids. Raises ModelInvalid."""
    if not (folder / "tokenizer.json").is_file():
        return None
    try:
        return Tokens(folder, max_text)
    except TemplateSyntaxError as error:
        raise ModelInvalid(
            f"{folder}: the chat template is invalid in line {error.lineno}: {error.message}"
        ) from None
    except Exception as error:  # tokenizers raises no class of its own
        raise ModelInvalid(_describe(folder, error)) from None


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
