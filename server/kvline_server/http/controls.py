"""Keeps the texts of clients text: what a client writes never becomes one of the tokens that the
template writes, such as the end of a turn.

A rendered conversation says of each character who wrote it (traced.py). An added token is meant
only where all of it is the template's own; the rest is text, whatever it looks like.
"""

from __future__ import annotations

import re
import secrets

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

from kvline_server.http.errors import BadRequest
from kvline_server.http.traced import HISTORY, OWN, UNKNOWN

Span = tuple[int, int]  # characters
NOT_TEXT = "the text of a control token, which this model's tokenizer cannot write as text"
_RUN = re.compile(rb"(.)\1*", re.DOTALL)  # of one origin
_WORD = re.compile(r"\w")


class Unfollowed(Exception):
    """A token's text; it holds characters of unknown origin."""


class Finder:
    """Finds added tokens in a text as their tokenizer does, its normalizer included."""

    def __init__(self, tokenizer: Tokenizer, tokens: list[AddedToken]) -> None:
        self._tokenizer = Tokenizer(WordLevel({"\0": 0}, unk_token="\0"))  # noqa: S106
        if tokenizer.normalizer is not None:
            self._tokenizer.normalizer = tokenizer.normalizer
        self._tokenizer.add_tokens(tokens)
        self._tokens = self._tokenizer.get_added_tokens_decoder()

    def find(self, text: str) -> list[tuple[AddedToken, Span]]:
        """Each token, and where it is, without the blanks that it takes."""
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        found = []
        for id, (start, end) in zip(encoded.ids, encoded.offsets, strict=True):
            if (token := self._tokens.get(id)) is not None:
                part = text[start:end]
                start += len(part) - len(part.lstrip()) if token.content[:1].strip() else 0
                end -= len(part) - len(part.rstrip()) if token.content[-1:].strip() else 0
                found.append((token, (start, end)))
        return found


class Controls:
    """The added tokens of a tokenizer, and an encoder that knows which of them are meant.

    It has the same model, normalizer and so on, and other names for the tokens, which no client
    can know: those that are meant get them, and all else is text, in one pass, so that nothing is
    split where the tokenizer would not."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        # Added blanks are no controls: it is how some tokenizers write indented text.
        named = {id: t for id, t in added.items() if t.special or t.content.strip()}
        self._finder = Finder(tokenizer, list(named.values()))
        self._special_ids = frozenset(id for id, token in added.items() if token.special)
        self._renamed = Tokenizer(tokenizer.model)  # shared: a vocabulary takes many MiB
        for part in ("normalizer", "pre_tokenizer"):
            if getattr(tokenizer, part) is not None:
                setattr(self._renamed, part, getattr(tokenizer, part))
        prefix = secrets.randbelow(10**23)
        names = {id: f"\u27e6{prefix}-{id:09}\u27e7" for id in named}
        self._names = {token.content: names[id] for id, token in named.items()}
        renamed = {id: _named(token, names.get(id, "")) for id, token in added.items()}
        self._renamed.add_tokens(list(renamed.values()))
        ids = {id: self._renamed.token_to_id(token.content) for id, token in renamed.items()}
        self._ids = {other: id for id, other in ids.items()}

    def encode(self, text: str, origins: bytes) -> list[int]:
        """Raises Unfollowed, and BadRequest where the tokenizer's model itself makes a control
        token of a text."""
        found = [(token, origins[start:end]) for token, (start, end) in self._finder.find(text)]
        for token, of in found:
            if UNKNOWN in of:
                raise Unfollowed(token.content)
        if all(len(set(of)) == 1 and _meant(token, of[0]) for token, of in found):
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        ids = self._renamed.encode(self._rename(text, origins), add_special_tokens=False).ids
        if any(id in self._special_ids and id not in self._ids for id in ids):
            raise BadRequest(f"messages: {NOT_TEXT}", "messages")
        return [self._ids.get(id, id) for id in ids]

    def _rename(self, text: str, origins: bytes) -> str:
        out, at = [], 0
        for run in _RUN.finditer(origins):
            first, origin = run.start(), run[0][0]
            if origin not in (OWN, HISTORY):
                continue
            for token, (start, end) in self._finder.find(text[first : run.end()]):
                start, end = first + start, first + end
                inside = _WORD.match(text[start - 1 : start]) or _WORD.match(text[end : end + 1])
                if _meant(token, origin) and not (token.single_word and inside):
                    out += [text[at:start], self._names[token.content]]
                    at = end
        return "".join([*out, text[at:]])


def _meant(token: AddedToken, origin: int) -> bool:
    """An answer in the history keeps tokens that were shown as text, as in `<think>`: so it has the
    tokens it had, which are in the prefix cache. Special ones were never shown."""
    return origin == OWN or (origin == HISTORY and not token.special)


def _named(token: AddedToken, name: str) -> AddedToken:
    """`name`: another than the token has, if any. Whether it stands alone was seen before."""
    return AddedToken(
        name or token.content,
        single_word=token.single_word and not name,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )
