"""Anthropic's /v1/messages: an answer as its content blocks, and its events in its order."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import msgspec

from kvline_server.formats.events import (
    CallArguments,
    CallEnd,
    CallStart,
    Event,
    Reasoning,
    Text,
)
from kvline_server.http.anthropic_request import to_chat
from kvline_server.http.chat import Chat
from kvline_server.http.conversation import no_number
from kvline_server.http.error_forms import anthropic_body
from kvline_server.http.errors import ApiError
from kvline_server.http.growing import GrowingText
from kvline_server.http.pieces import Piece
from kvline_server.http.protocol.anthropic import MessagesRequest
from kvline_server.http.protocol.chat import ChatRequest
from kvline_server.http.protocol.strict import parse
from kvline_server.http.translated import SENT_COPIES, Object, Sent, Used

# By the kind of block: its field that grows, the name of a delta and of the delta's field.
GROWING = {
    "text": ("text", "text_delta", "text"),
    "thinking": ("thinking", "thinking_delta", "thinking"),
    "tool_use": ("input", "input_json_delta", "partial_json"),
}

BLOCK_BYTES = 256  # of a block beside its text


class Messages:
    id_prefix: ClassVar[str] = "msg_"

    def read(self, value: Object) -> ChatRequest:
        chat, fields = to_chat(parse(MessagesRequest, value))
        self.field = fields.of
        return chat

    def begin(self, work: Chat) -> Iterator[Sent]:
        """The first event has tokens of the prefix cache, which are known with the first token."""
        self._work, self._last, self._begun = work, Piece(), False
        self._blocks = Blocks(not work.request.stream, partial(work.call_id, "toolu_"))
        return iter(())

    def write(self, piece: Piece, used: Used) -> Iterator[Sent]:
        self._last = piece
        yield from self._start(used)
        for event in piece.written():
            for name, data in self._blocks.write(event):
                yield name, {"type": name, **data}

    def end(self, used: Used) -> Iterator[Sent]:
        yield from self._start(used)
        for name, data in self._blocks.close():
            yield name, {"type": name, **data}
        reason = self._reason()
        stop = self._last.stop if reason == "stop_sequence" else None
        ended = {"stop_reason": reason, "stop_sequence": stop}
        self._done = self._message(used) | ended
        yield "message_delta", {"type": "message_delta", "delta": ended, "usage": _usage(used)}
        yield "message_stop", {"type": "message_stop"}

    def fail(self, error: ApiError) -> Iterator[Sent]:
        yield "error", anthropic_body(error)

    def answer(self) -> Object:
        return self._done

    def kept(self) -> int:
        return SENT_COPIES * self._blocks.nbytes

    def _start(self, used: Used) -> Iterator[Sent]:
        if not self._begun:
            self._begun = True
            message = self._message(Used(used.prompt, used.cached))
            yield "message_start", {"type": "message_start", "message": message | {"content": []}}

    def _message(self, used: Used) -> Object:
        return {
            "id": self._work.id,
            "type": "message",
            "role": "assistant",
            "model": self._work.limits.served_name,
            "content": self._blocks.done,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(used),
        }

    def _reason(self) -> str:
        """Clients run calls at `tool_use` alone, also where a stop sequence came behind them."""
        if self._last.finish == "length":
            return "max_tokens"
        if self._last.finish == "tool_calls":
            return "tool_use"
        return "end_turn" if self._last.stop is None else "stop_sequence"


def _usage(used: Used) -> Object:
    """Anthropic counts the tokens of a prompt that were cached beside the others."""
    return {
        "input_tokens": used.prompt - used.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": used.cached,
        "output_tokens": used.output,
    }


class Blocks:
    """From what a model writes to content blocks and their events, without their types."""

    def __init__(self, keeps: bool, call_id: Callable[[], str]) -> None:
        """`keeps`: the blocks, for a whole answer."""
        self.done: list[Object] = []
        self._keeps, self._call_id = keeps, call_id
        self._index = self._closed = 0  # of the open block; bytes of those before
        self._open: Object | None = None
        self._text = GrowingText()  # of the open block

    @property
    def nbytes(self) -> int:
        """Of all that is kept."""
        return self._closed + len(self._text)

    def write(self, event: Event) -> Iterator[Sent]:
        if isinstance(event, Text):
            yield from self._grow({"type": "text", "text": ""}, event.text)
        elif isinstance(event, Reasoning):
            yield from self._grow({"type": "thinking", "thinking": "", "signature": ""}, event.text)
        elif isinstance(event, CallStart):
            id = self._call_id()
            yield from self._begin({"type": "tool_use", "id": id, "name": event.name, "input": {}})
        elif isinstance(event, CallArguments):
            yield self._delta(event.text)
        elif isinstance(event, CallEnd):
            yield from self.close()

    def close(self) -> Iterator[Sent]:
        if self._open is None:
            return
        block, text = self._open, self._text
        self._closed += len(text) + BLOCK_BYTES if self._keeps else 0
        self._open, self._text = None, GrowingText()
        yield "content_block_stop", {"index": self._index}
        self._index += 1
        if self._keeps:
            whole = text.whole()
            called = block["type"] == "tool_use"
            self.done.append(
                block | {GROWING[block["type"]][0]: _object(whole) if called else whole}
            )

    def _grow(self, block: Object, text: str) -> Iterator[Sent]:
        """More of the open block, or a new one where that is of another kind."""
        if self._open is None or self._open["type"] != block["type"]:
            yield from self._begin(block)
        yield self._delta(text)

    def _begin(self, block: Object) -> Iterator[Sent]:
        yield from self.close()
        self._open = block
        yield "content_block_start", {"index": self._index, "content_block": block}

    def _delta(self, text: str) -> Sent:
        assert self._open is not None
        part: Any = self._text.add(text) if self._keeps else text
        _, kind, field = GROWING[self._open["type"]]
        return "content_block_delta", {"index": self._index, "delta": {"type": kind, field: part}}


def _object(text: msgspec.Raw) -> msgspec.Raw:
    """The arguments of a call; of one that was cut, or is no JSON, nothing is known to be whole."""
    arguments = msgspec.json.decode(text, type=str)
    try:
        whole = isinstance(json.loads(arguments, parse_constant=no_number), dict)
    except (ValueError, RecursionError):
        whole = False
    return msgspec.Raw(arguments.encode() if whole else b"{}")
