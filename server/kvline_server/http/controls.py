"""Keeps the texts of clients text: what a client writes never becomes one of the tokens that the
template writes, such as the end of a turn.

A chat template joins both to one text, in which nothing tells them apart. So the places of a
client's text that could be part of such a token are marked before it is rendered, by random digits,
which neither `tojson` nor a change of case alters; after it, only what is outside of them is a
token.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

from kvline_server.http.errors import BadRequest
from kvline_server.http.renderers import Known

Span = tuple[int, int]  # characters
DIGITS = 10**23
CASES: tuple[Callable[[str], str], ...] = (
    str.lower,
    str.upper,
    str.title,
    str.capitalize,
    str.swapcase,
)
TAKEN_OUT = 3  # times, so that what is left is not again something to take out
NOT_TEXT = "the text of a control token, which this model's tokenizer cannot write as text"


class Finder:
    """Finds added tokens in a text as their tokenizer does, its normalizer included."""

    def __init__(self, tokenizer: Tokenizer, tokens: list[AddedToken]) -> None:
        self._tokenizer = Tokenizer(WordLevel({"\0": 0}, unk_token="\0"))  # noqa: S106
        if tokenizer.normalizer is not None:
            self._tokenizer.normalizer = tokenizer.normalizer
        self._tokenizer.add_tokens(tokens)
        # id_to_token would give what a normalizer makes of it
        self._contents = {
            id: token.content for id, token in self._tokenizer.get_added_tokens_decoder().items()
        }
        texts = list(self._contents.values())
        self._starts = {text[:size] for text in texts for size in range(1, len(text))}
        self._ends = {text[at:] for text in texts for at in range(1, len(text))}
        self._all = "\0".join(texts)
        self._longest = max(map(len, texts), default=0)

    def whole(self, text: str) -> list[tuple[str, Span]]:
        """-> each token's content, and where it is"""
        found = self._tokenizer.encode(text, add_special_tokens=False)
        pairs = zip(found.ids, found.offsets, strict=True)
        return [(self._contents[id], span) for id, span in pairs if id in self._contents]

    def parts(self, text: str) -> list[Span]:
        """Where a part of a token is that the text before or after could complete."""
        core = text.strip()
        if not core:
            return []
        start = len(text) - len(text.lstrip())
        end, most = start + len(core), min(self._longest - 1, len(core))
        if len(core) < self._longest and core in self._all:
            return [(start, end)]
        sizes = range(most, 0, -1)
        head = next((size for size in sizes if core[:size] in self._ends), 0)
        tail = next((size for size in sizes if core[-size:] in self._starts), 0)
        return [(start, start + head)] * bool(head) + [(end - tail, end)] * bool(tail)


@dataclass(slots=True)
class Marks:
    """Of one conversation."""

    template: Known
    used: bool = False
    opening: str = field(default_factory=lambda: str(DIGITS + secrets.randbelow(DIGITS)))
    closing: str = field(default_factory=lambda: str(2 * DIGITS + secrets.randbelow(DIGITS)))

    def protect(self, value: Any, finder: Finder) -> Any:
        """`value`, JSON, with the places marked in all its texts and keys."""
        if isinstance(value, str):
            return self._mark(value, self._spans(value, finder))
        if isinstance(value, list):
            return [self.protect(item, finder) for item in value]
        if isinstance(value, dict):
            return {self.protect(k, finder): self.protect(v, finder) for k, v in value.items()}
        return value

    def _spans(self, text: str, finder: Finder) -> list[Span]:
        spans = [span for _, span in finder.whole(text)]
        if text.strip() not in self.template.words:
            spans += finder.parts(text)
        if self.template.changes_case:
            for change in CASES:
                other = change(text)
                found = [span for _, span in finder.whole(other)] + finder.parts(other)
                spans += found if len(other) == len(text) else [(0, len(text))] * bool(found)
        rest = self._rest(text)
        if rest != text and len(finder.whole(rest)) > len(spans):
            return [(0, len(text))]
        return list(_merged(sorted(spans)))

    def _rest(self, text: str) -> str:
        """What stays of a text where the template takes out all that it may."""
        for _ in range(TAKEN_OUT):
            for removed in self.template.removed:
                text = text.replace(removed, "")
        return text

    def _mark(self, text: str, spans: list[Span]) -> str:
        if not spans:
            return text
        self.used = True
        out, at = [], 0
        for start, end in spans:
            out += [text[at:start], self.opening, text[start:end], self.closing]
            at = end
        return "".join([*out, text[at:]])

    def split(self, text: str) -> list[tuple[str, bool]]:
        """A rendered text without the marks. -> its parts, and whether each is a client's; where
        the template has cut a mark off, all up to the next one is"""
        parts = re.split(f"({self.opening}|{self.closing})", text)
        around = [self.closing, *parts[1::2], self.opening]
        return [
            (part, around[i] == self.opening or around[i + 1] == self.closing)
            for i, part in enumerate(parts[::2])
        ]


class Controls:
    """The added tokens of a tokenizer, and an encoder that knows which of them are meant.

    It has the same model, normalizer and so on, and other names for the tokens, which no client
    can know: those that a template wrote get them, and all else is text, in one pass, so that
    nothing is split where the tokenizer would not."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        # Added blanks are no controls: it is how some tokenizers write indented text.
        named = {id: token for id, token in added.items() if token.special or _visible(token)}
        special = [token for token in named.values() if token.special]
        self.every = Finder(tokenizer, list(named.values()))
        self.special = Finder(tokenizer, special) if len(special) < len(named) else self.every
        self._special_ids = frozenset(id for id, token in added.items() if token.special)
        self._renamed = Tokenizer(tokenizer.model)  # shared: a vocabulary takes many MiB
        for part in ("normalizer", "pre_tokenizer"):
            if getattr(tokenizer, part) is not None:
                setattr(self._renamed, part, getattr(tokenizer, part))
        prefix = secrets.randbelow(DIGITS)
        names = {id: f"\u27e6{prefix}-{id:09}\u27e7" for id in named}
        self._names = {token.content: names[id] for id, token in named.items()}
        renamed = {id: _named(token, names.get(id, token.content)) for id, token in added.items()}
        self._renamed.add_tokens(list(renamed.values()))
        ids = {id: self._renamed.token_to_id(token.content) for id, token in renamed.items()}
        self._ids = {other: id for id, other in ids.items()}

    def encode(self, parts: list[tuple[str, bool]]) -> list[int]:
        """Raises BadRequest where the tokenizer's model itself makes a control token of a text."""
        text = "".join(text if theirs else self._rename(text) for text, theirs in parts)
        ids = self._renamed.encode(text, add_special_tokens=False).ids
        if any(id in self._special_ids and id not in self._ids for id in ids):
            raise BadRequest(f"messages: {NOT_TEXT}", "messages")
        return [self._ids.get(id, id) for id in ids]

    def _rename(self, text: str) -> str:
        out, at = [], 0
        for content, (start, end) in self.every.whole(text):
            found = text[start:end]  # with the blanks that the token takes
            left = len(found) - len(found.lstrip()) if content[:1].strip() else 0
            right = len(found.rstrip()) if content[-1:].strip() else len(found)
            out += [text[at:start], found[:left], self._names[content], found[right:]]
            at = end
        return "".join([*out, text[at:]])


def _visible(token: AddedToken) -> bool:
    return bool(token.content.strip())


def _named(token: AddedToken, name: str) -> AddedToken:
    return AddedToken(
        name,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )


def _merged(spans: list[Span]) -> Iterator[Span]:
    """Sorted spans, those that overlap as one."""
    start, end = spans[0] if spans else (0, 0)
    for low, high in spans[1:]:
        if low >= end:
            yield start, end
            start, end = low, high
        end = max(end, high)
    if spans:
        yield start, end
