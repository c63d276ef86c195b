"""Pieces of grammars in llguidance's dialect of Lark.

Some of a tokenizer's added tokens are no text to llguidance: special ones, and those in angle
brackets. A grammar names them by id; their text, spelt with other tokens, is another thing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping

ANY_TEXT = r"/(?s:.)*/"  # a terminal; no token that is no text
Marks = Mapping[str, int]  # ids of the tokens that are no text


def marks(added: Iterable[tuple[int, str, bool]]) -> dict[str, int]:
    """Of added tokens: id, content, and whether it is special."""
    return {
        content: id
        for id, content, special in added
        if special or (content.startswith("<") and content.endswith(">"))
    }


def literal(text: str, known: Marks) -> str:
    """An expression for exactly this text, in which the marks are tokens."""
    return " ".join(parts(text, known))


def parts(text: str, known: Marks) -> list[str]:
    """Terminals and tokens, one after the other."""
    if not text or not known:
        return [quoted(text)]
    names = sorted(known, key=len, reverse=True)
    found = re.split(f"({'|'.join(map(re.escape, names))})", text)
    return [token(known[part]) if part in known else quoted(part) for part in found if part]


def token(id: int) -> str:
    return f"<[{id}]>"


def quoted(text: str) -> str:
    """A text as a terminal."""
    return json.dumps(text, ensure_ascii=False)


def regex(pattern: str) -> str:
    """A regex as a terminal."""
    escaped = re.sub(r"\\.|/|\n", _escaped, pattern, flags=re.DOTALL)
    return f"/{escaped}/"


def _escaped(found: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(found[0], found[0])
