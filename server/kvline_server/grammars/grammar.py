"""A grammar that an answer must follow, as a request gives it and as it is compiled.

Here are the bounds that need no parser; a schema that llguidance refuses is refused when it is
compiled (compiled.py), with its words.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from kvline_server.formats.keywords import unkept
from kvline_server.options.grammars import MAX_BYTES

Kind = Literal["json_schema", "json_object", "regex", "choice", "lark"]

MAX_DEPTH = 64  # of objects and lists in a schema
MAX_CHOICES = 16384
MAX_PATTERN = 512  # characters of whitespace_pattern

# Between the tokens of JSON, each time: nothing, a space, or a line break with its indentation. Any
# amount would let a model write blanks to its end: some never leave a run of them.
WHITESPACE = r"\x20|\r?\n[\x20\x09]{0,32}"
COMPACT = ""
# The field of a schema by which llguidance may be made to ignore what it cannot enforce.
OVERRIDES = "x-guidance"


class GrammarInvalid(Exception):
    """`param` is the request's field that it comes from."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    kind: Kind
    text: str = ""  # a schema, a regex, a JSON list of texts or a Lark grammar
    whitespace: str = WHITESPACE  # of JSON, a regex; COMPACT: none
    # What may stand before it, or in its place, as Lark that names it @answer; empty: nothing.
    around: str = ""

    def key(self) -> bytes:
        """The same for the same grammar, and for no other one."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=16).digest()


def schema_text(value: Any, param: str) -> str:
    """A JSON schema as JSON. Raises GrammarInvalid."""
    fields = object_of(value, param, "a JSON schema, an object")
    if OVERRIDES in fields:
        message = "not served; whitespace is set in structured_outputs"
        raise GrammarInvalid(message, f"{param}.{OVERRIDES}")
    text = text_of(fields, param)
    if (reason := unkept(fields)) is not None:
        raise GrammarInvalid(reason, param)
    return text


def object_of(value: Any, param: str, expected: str = "an object") -> dict[str, Any]:
    if not isinstance(value, dict):
        raise GrammarInvalid(f"expected {expected}", param)
    return value


def text_of(value: Any, param: str) -> str:
    """A schema, or another JSON value, as JSON. Raises GrammarInvalid."""
    if depth(value) > MAX_DEPTH:
        raise GrammarInvalid(f"more than {MAX_DEPTH} objects and lists in each other", param)
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        raise GrammarInvalid("a number that is not finite", param) from None
    if "\\u0000" in text:
        raise GrammarInvalid("a text with the character NUL", param)
    return checked(text, param)


def checked(text: str, param: str) -> str:
    """The text, if it is one that may be compiled. Raises GrammarInvalid."""
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise GrammarInvalid("half of a surrogate pair, which is no text", param) from None
    if size > MAX_BYTES:
        raise GrammarInvalid(f"{size} bytes, of which this server takes {MAX_BYTES}", param)
    if "\0" in text:
        raise GrammarInvalid("a text with the character NUL", param)
    return text


def depth(value: Any) -> int:
    """Of objects and lists in each other; without recursion, which a deep value would exhaust."""
    level, found = [value], 0
    while level := [each for each in level if isinstance(each, dict | list)]:
        found += 1
        if found > MAX_DEPTH:
            break
        level = [inner for each in level for inner in _inside(each)]
    return found


def _inside(value: dict[str, Any] | list[Any]) -> Iterator[Any]:
    return iter(value.values() if isinstance(value, dict) else value)
