"""Text to tokens and back, with the model's own tokenizer; chat_tokens.py has conversations."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from kvline_server.http.errors import BadRequest

MAX_TEXT = 8 << 20
PART = 8192  # characters tokenised at a time to estimate the length of a text
SENTENCEPIECE = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "Sequence"}
CACHED_TOKENS = 1 << 13  # whose bytes are kept: about 1 MiB
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Tokens:
    """A tokenizer from a model folder."""

    def __init__(self, folder: Path, max_text: int = MAX_TEXT) -> None:
        self.max_text = max_text  # bytes
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_truncation()  # a file may ask for either, which would change prompts
        self.tokenizer.no_padding()
        added = self.tokenizer.get_added_tokens_decoder()
        self._added = {id: token.content for id, token in added.items()}
        self.special = {t.content: i for i, t in added.items() if t.special}
        self.added = {text: id for id, text in self._added.items()}
        self.special_ids = frozenset(self.special.values())
        decoder = json.loads(self.tokenizer.to_str()).get("decoder")
        kinds = set(re.findall(r'"type": "(\w+)"', json.dumps(decoder)))
        self._byte_level = "ByteLevel" in kinds
        self._bytes_alone = kinds == {"ByteLevel"} or (bool(kinds) and kinds <= SENTENCEPIECE)
        self._unicode_to_byte = _unicode_to_byte()
        # Added tokens are text as it is written, not letters that stand for bytes; but one letter
        # alone may be both.
        written = {t.content for t in added.values() if self._byte_level and len(t.content) > 1}
        self._written = frozenset(written | self.special.keys())
        self._longest = max(map(len, self.tokenizer.get_vocab()), default=0)
        self.token_bytes = lru_cache(CACHED_TOKENS)(self._token_bytes)

    def kinds(self) -> Iterator[tuple[int, str, bool]]:
        """Of each added token: id, text, and whether it is special."""
        return ((id, text, id in self.special_ids) for text, id in self.added.items())

    def encode(self, text: str, most: int = 1 << 30, special: bool = True) -> list[int]:
        """A completion prompt; special tokens in its text are encoded as such, as users of base
        models expect. `special`: also those that the tokenizer adds to each text. Raises BadRequest
        where it is far beyond `most` tokens."""
        self.check_length(text, most, "prompt")
        return list(self.tokenizer.encode(text, add_special_tokens=special).ids)

    def check_length(self, text: str, most: int, name: str) -> None:
        """Rejects a text that cannot fit without tokenising all of it, which takes hundreds of
        bytes per token. Parts may have more tokens than the whole text, at their ends: each count
        is reduced by the length of the longest token, and twice `most` is allowed."""
        room, size = 2 * most, len(text.encode())
        if size > self.max_text:
            raise self.too_long(size, name)
        if size > room:  # a token has a byte or more
            self._estimate(text, room, most, name)

    def too_long(self, size: int, name: str) -> BadRequest:
        return BadRequest(
            f"{name}: a text of {size} bytes; this server tokenises {self.max_text} at most",
            name,
            "context_length_exceeded",
        )

    def _estimate(self, text: str, room: int, most: int, name: str) -> None:
        for start in range(0, len(text), PART):
            part = self.tokenizer.encode(text[start : start + PART], add_special_tokens=False)
            room -= max(0, len(part.ids) - self._longest)
            if room < 0:
                raise BadRequest(
                    f"{name}: more than {most} tokens, which is the context",
                    name,
                    "context_length_exceeded",
                )

    def decode(self, ids: list[int]) -> str:
        if self._byte_level and self._bytes_alone:
            # Its own decoder takes an added token for letters that stand for bytes.
            return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def text_bytes(self, ids: list[int]) -> int:
        """Of their text, with the blank that some decoders put between two, before it is made."""
        return len(ids) + sum(len(self.token_bytes(id)) for id in ids)

    def stream(self) -> TextStream:
        return ByteStream(self) if self._bytes_alone else RuleStream(self)

    def _token_bytes(self, token: int) -> bytes:
        """The bytes of a token; not always whole characters."""
        # id_to_token gives what a normalizer makes of an added token.
        text = self._added.get(token) or self.tokenizer.id_to_token(token)
        if text is None:
            return b""
        if text in self._written:
            return text.encode()
        if self._byte_level and all(c in self._unicode_to_byte for c in text):
            return bytes(self._unicode_to_byte[c] for c in text)
        single = _BYTE_TOKEN.fullmatch(text)
        if single:
            return bytes([int(single[1], 16)])
        return text.replace("\u2581", " ").encode()

    def offsets(self, ids: list[int], text: str) -> list[int]:
        """The offset in `text` at which each token of `ids` begins, in characters. A token that
        begins inside a character gets that character's offset; one that is not part of the text,
        such as a beginning-of-text token, gets 0."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        starts, at = [], 0
        for token in ids:
            starts.append(at)
            at += len(decoder.decode(self.token_bytes(token)))
        at += len(decoder.decode(b"", final=True))
        hidden = at - len(text)  # such as a beginning-of-text token
        return [min(max(0, start - hidden), len(text)) for start in starts]

    def offsets_of_text(self, ids: list[int], text: str) -> list[int]:
        """The same, where `ids` are the text's. Where the tokenizer changed the text first, as in
        NFC, only it knows where each token came from."""
        normalizer = self.tokenizer.normalizer
        if normalizer is None or normalizer.normalize_str(text) == text:
            return self.offsets(ids, text)
        starts, end = [], 0
        for start, until in self.tokenizer.encode(text).offsets:
            # A special token has no place of its own; some tokenizers leave out a token's blank.
            beside = start == until or text[end:start].isspace()
            starts.append(end if beside else start)
            end = max(end, until)
        return starts

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode("utf-8", "replace")


class TextStream(Protocol):
    """Incremental detokenisation: whole characters only, without special tokens."""

    sent: int  # characters so far

    def push(self, token: int) -> str: ...

    def flush(self) -> str:
        """The rest, such as an incomplete character at the end."""


class ByteStream:
    """For tokenizers whose text is the concatenated bytes of the tokens: constant cost per token,
    and an answer keeps its leading space."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.sent = 0

    def push(self, token: int) -> str:
        if token in self._tokens.special_ids:
            return ""
        return self._count(self._decoder.decode(self._tokens.token_bytes(token)))

    def flush(self) -> str:
        return self._count(self._decoder.decode(b"", final=True))

    def _count(self, text: str) -> str:
        self.sent += len(text)
        return text


class RuleStream:
    """For other tokenizers: their own decoder, whose result may depend on neighbouring tokens."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokenizer = tokens.tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self.sent = 0

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._stream.step(self._tokenizer, token)
        if text is None:
            return ""
        self.sent += len(text)
        return str(text)

    def flush(self) -> str:
        whole = str(self._tokenizer.decode(self._ids, skip_special_tokens=True))
        rest = whole[self.sent :]
        self.sent = len(whole)
        return rest


def _unicode_to_byte() -> dict[str, int]:
    """GPT-2's printable alphabet for bytes, inverted."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(b): b for b in plain}
    table.update({chr(256 + i): b for i, b in enumerate(sorted(set(range(256)) - set(plain)))})
    return table
