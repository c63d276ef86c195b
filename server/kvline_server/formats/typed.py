"""Values that a format writes as plain text, as JSON text of the type that the schema declares."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from kvline_server.formats.json_text import BLANKS, Json, quoted
from kvline_server.formats.python_text import PythonValue
from kvline_server.formats.tools import TYPES, listed_values, resolved, types

_BY_FIRST = {'"': "string", "{": "object", "[": "array", "t": "boolean", "f": "boolean"}


class Kind(Enum):
    """How much of a value must be known before any of it can be shown."""

    STRING = auto()
    STRING_OR_NULL = auto()
    WHOLE = auto()


def kind(schema: Any, root: Mapping[str, Any]) -> Kind:
    if listed_values(resolved(schema, root)) is not None:
        return Kind.WHOLE
    found = types(schema, root)
    if "string" not in found:
        return Kind.WHOLE
    return Kind.STRING_OR_NULL if "null" in found and found != TYPES else Kind.STRING


def typed(text: str, schema: Any, root: Mapping[str, Any]) -> str:
    """A string where one is allowed, and where the text is no value of another type."""
    value = text.strip(BLANKS)
    found, listed = types(schema, root), listed_values(resolved(schema, root))
    if listed is not None:
        found -= {"string"} if text not in listed else found - {"string"}
    null = value == "null" and found != TYPES
    if "string" in found and not (null and "null" in found):
        return f'"{quoted(text)}"'
    kind = json_type(value)
    if kind in found or (kind == "number" and "integer" in found):
        return value
    return _as_python(value, found) or f'"{quoted(text)}"'


def json_type(text: str) -> str | None:
    """The type of a JSON value; None where the text is none."""
    if not text:
        return None
    scan = Json()
    end = scan.feed(text)
    scan.end()
    if end < len(text) or not scan.done:
        return None
    return "null" if text == "null" else _BY_FIRST.get(text[0], "number")


def _as_python(text: str, found: frozenset[str]) -> str | None:
    """True and None, and lists and dicts of them, as models of that habit write them."""
    scan = PythonValue()
    end = scan.feed(text)
    scan.end()
    out = scan.take()
    if scan.broken or not scan.done or end < len(text):
        return None
    return out if json_type(out) in found else None
