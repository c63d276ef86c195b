"""Parts of a grammar in llguidance's dialect of Lark: pure text."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from kvline_server.formats.tools import MOST_SCHEMAS, followed
from kvline_server.options.grammars import MAX_BYTES

MOST_PARTS = 20_000  # of all schemas, that are followed for the types of values: 0.1 s at most
# One blank behind each comma and colon, or none: a model that may write any blanks can write
# nothing else until its tokens are used up.
_BLANKS = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "coerce_one_of": False,
    "lenient": False,
}
# Text that only one way goes on is forced as the tokenizer cuts it, and llguidance 1.9 then takes a
# mark's token where a value has the mark's text in it, which its own parser refuses.
OPTIONS = '%llguidance {"no_forcing": true}'
ANY = "(?s:.*)"


class GrammarTooLarge(Exception):
    """A grammar takes more than a server builds; the message says of what."""


class Rules:
    """The rules of a grammar, by name. Raises GrammarTooLarge as soon as they are: one schema may
    stand in thousands of them."""

    def __init__(self, ids: Mapping[str, int], marks: Collection[str]) -> None:
        self._ids = ids
        self._rules: dict[str, str] = {}
        self._size = 0  # characters, of which a text has as many as bytes or fewer
        self._parts = 0
        names = "|".join(map(re.escape, sorted(marks, key=len, reverse=True)))
        self._marks = re.compile(f"({names})") if names else None

    def add(self, name: str, body: str) -> str:
        """-> the name; in capitals where the rule is one terminal, as llguidance has it"""
        assert name not in self._rules
        self._rules[name] = body
        self._size += len(name) + len(body)
        if self._size > MAX_BYTES:
            raise GrammarTooLarge(f"more than {MAX_BYTES} bytes of grammar")
        return name

    def types(self, schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
        """As tools.types has them."""
        left = [MOST_SCHEMAS]
        found = followed(schema, root, left)
        self._parts += MOST_SCHEMAS - max(0, left[0])
        if self._parts > MOST_PARTS:
            raise GrammarTooLarge(f"more than {MOST_PARTS} parts of schemas")
        return found

    def text(self, text: str) -> str:
        """Text in which marks are tokens where the tokenizer has them."""
        parts = self._marks.split(text) if self._marks is not None else [text]
        return " ".join(self.mark(part) for part in parts if part)

    def mark(self, text: str) -> str:
        return f"<[{self._ids[text]}]>" if text in self._ids else literal(text)

    def is_token(self, mark: str) -> bool:
        return mark in self._ids

    def json(self, name: str, schema: Mapping[str, Any]) -> str:
        """A value of a JSON schema, with bounded blanks."""
        dumped = json.dumps({**schema, "x-guidance": _BLANKS})
        return self.add(name, f"%json {dumped}")

    def lark(self, start: str) -> str:
        rules = "\n".join(f"{name}: {body}" for name, body in self._rules.items())
        return f"{OPTIONS}\nstart: {start}\n{rules}\n"


def literal(text: str) -> str:
    return json.dumps(text)


def regex(pattern: str) -> str:
    """A pattern between slashes."""
    inside = re.sub(r"\\.|/", lambda m: "\\/" if m[0] == "/" else m[0], pattern, flags=re.S)
    return f"/{inside}/".replace("\n", "\\n")


def escaped(text: str) -> str:
    """A pattern of one text."""
    return "".join(
        each if each.isalnum() or ord(each) > 127 else f"\\x{ord(each):02x}" for each in text
    )


def without(pattern: str, texts: Collection[str]) -> str:
    """A terminal of what the pattern matches and where none of the texts occurs."""
    if not texts:
        return regex(pattern)
    within = "|".join(escaped(text) for text in sorted(texts))
    return f"({regex(pattern)} & ~{regex(f'{ANY}({within}){ANY}')})"


def lacking(mark: str) -> str:
    """A pattern of the texts in which the mark, whose first character it has once, does not occur.
    A complement is none of UTF-8 alone: with a length beside it, whether anything is left of both
    takes more than a lexer may have."""
    first = escaped(mark[0])
    assert mark[0] not in mark[1:]
    within = ""  # what may follow a part of the mark: nothing, or what does not go on with it
    for each in map(escaped, reversed(mark[1:])):
        longer = f"|{each}{within}" if within else ""
        within = f"(|[^{first}{each}][^{first}]*{longer})"
    return f"[^{first}]*({first}{within})*"
