"""Text to tokens and back, with the model's own tokenizer and chat template.

The template runs in jinja2's immutable sandbox; requests cannot bring their own. Special tokens
written in a user's chat message are encoded as plain text.
"""

from __future__ import annotations

import codecs
import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from kvline_server.http.errors import BadRequest

MAX_RENDERED = 8 << 20
PART = 8192  # characters tokenised at a time to estimate the length of a text
SENTENCEPIECE = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "Sequence"}
CACHED_TOKENS = 1 << 13  # whose bytes are kept: about 1 MiB
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Tokens:
    """A tokenizer and chat template from a model folder."""

    def __init__(self, folder: Path, max_text: int = MAX_RENDERED) -> None:
        self.max_text = max_text  # bytes
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        settings = _read(folder / "tokenizer_config.json")
        added = self.tokenizer.get_added_tokens_decoder()
        self.special = {t.content: i for i, t in added.items() if t.special}
        self.special_ids = frozenset(self.special.values())
        self._specials = sorted(self.special, key=len, reverse=True)
        self._variables = {
            key: _token_text(settings.get(key)) for key in ("bos_token", "eos_token")
        }
        self._template = _template(folder, settings)
        decoder = json.loads(self.tokenizer.to_str()).get("decoder")
        kinds = set(re.findall(r'"type": "(\w+)"', json.dumps(decoder)))
        self._byte_level = "ByteLevel" in kinds
        self._bytes_alone = kinds == {"ByteLevel"} or (bool(kinds) and kinds <= SENTENCEPIECE)
        self._unicode_to_byte = _unicode_to_byte()
        self._longest = max(map(len, self.tokenizer.get_vocab()), default=0)
        self.token_bytes = lru_cache(CACHED_TOKENS)(self._token_bytes)

    def encode(self, text: str, most: int = 1 << 30) -> list[int]:
        """A completion prompt; special tokens in its text are encoded as such, as users of base
        models expect. Raises BadRequest where it is far beyond `most` tokens."""
        self._check_length(text, most, "prompt")
        return list(self.tokenizer.encode(text).ids)

    def _check_length(self, text: str, most: int, name: str) -> None:
        """Rejects a text that cannot fit without tokenising all of it, which takes hundreds of
        bytes per token. Parts may have more tokens than the whole text, at their ends: each count
        is reduced by the length of the longest token, and twice `most` is allowed."""
        room, size = 2 * most, len(text.encode())
        if size > self.max_text:
            raise BadRequest(
                f"{name}: a text of {size} bytes; this server tokenises {self.max_text} at most",
                name,
                "context_length_exceeded",
            )
        if size > room:  # a token has a byte or more
            self._estimate(text, room, most, name)

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

    def encode_chat(self, messages: list[dict[str, str]], most: int = 1 << 30) -> list[int]:
        """The rendered template's tokens. Raises BadRequest where the template raises an error, or
        the text is far beyond `most` tokens."""
        if self._template is None:
            raise BadRequest("this model has no chat template; use /v1/completions", "messages")
        mark = _unused_mark(messages)
        marked = [{k: self._escape(v, mark) for k, v in m.items()} for m in messages]
        try:
            text = self._template.render(
                messages=marked, add_generation_prompt=True, **self._variables
            )
        except SecurityError:
            raise BadRequest("the chat template used an operation that is not allowed") from None
        except TemplateError as error:
            raise BadRequest(f"the chat template failed: {str(error)[:200]}", "messages") from None
        if len(text) > MAX_RENDERED:
            raise BadRequest(
                "the rendered messages are too long", "messages", "context_length_exceeded"
            )
        self._check_length(text, most, "messages")
        ids: list[int] = []
        for part in text.split(mark):
            ids += self.tokenizer.encode(part, add_special_tokens=False).ids
        return ids

    def _escape(self, text: str, mark: str) -> str:
        """Splits each special token in a user's text, so that it is tokenised as plain text."""
        for special in self._specials:
            if special in text:
                text = text.replace(special, special[0] + mark + special[1:])
        return text

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def stream(self) -> TextStream:
        return ByteStream(self) if self._bytes_alone else RuleStream(self)

    def _token_bytes(self, token: int) -> bytes:
        """The bytes of a token; not always whole characters."""
        text = self.tokenizer.id_to_token(token)
        if text is None:
            return b""
        if text in self.special:
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


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text("utf-8"))) if path.is_file() else {}


def _token_text(value: Any) -> str:
    return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")


def _template(folder: Path, settings: dict[str, Any]) -> Any:
    file = folder / "chat_template.jinja"
    source = file.read_text("utf-8") if file.is_file() else settings.get("chat_template")
    if not isinstance(source, str):
        return None
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _raise
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(source)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _unused_mark(messages: list[dict[str, str]]) -> str:
    """A Unicode noncharacter (for internal use, 32 in this range) that no message contains."""
    for code in range(0xFDD0, 0xFDF0):
        if not any(chr(code) in text for m in messages for text in m.values()):
            return chr(code)
    raise BadRequest("the messages hold every Unicode noncharacter", "messages")


def _unicode_to_byte() -> dict[str, int]:
    """GPT-2's printable alphabet for bytes, inverted."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(b): b for b in plain}
    table.update({chr(256 + i): b for i, b in enumerate(sorted(set(range(256)) - set(plain)))})
    return table
