"""/v1/responses: an answer as OpenAI's items, and its events in OpenAI's order. Nothing is kept of
it, so `store` is answered false whatever was asked."""

from __future__ import annotations

import time
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
from kvline_server.http.chat import Chat
from kvline_server.http.errors import ApiError
from kvline_server.http.growing import GrowingText
from kvline_server.http.later import Later
from kvline_server.http.pieces import Piece
from kvline_server.http.protocol.chat import ChatRequest
from kvline_server.http.protocol.responses import ResponsesRequest
from kvline_server.http.protocol.strict import parse
from kvline_server.http.responses_request import Names, to_chat
from kvline_server.http.scores import held_outputs
from kvline_server.http.translated import SENT_COPIES, Object, Sent, Used
from kvline_server.ipc.messages import PackedScores

ITEM_BYTES = 1 << 10  # of an item beside its text


class Responses:
    id_prefix: ClassVar[str] = "resp_"

    def read(self, value: Object) -> ChatRequest:
        self._asked = parse(ResponsesRequest, value)
        chat, self._names, fields = to_chat(self._asked)
        self.field = fields.of
        # As the answer repeats them, which takes a fraction of their objects' memory.
        self._tools = msgspec.Raw(msgspec.json.encode(self._asked.tools or []))
        self._asked.input, self._asked.tools = "", None
        return chat

    def begin(self, work: Chat) -> Iterator[Sent]:
        self._work, self._finish = work, ""
        self._number = 0
        self._items = Items(work.id.removeprefix(self.id_prefix), self._names, work.call_id)
        self._scores: dict[int, list[PackedScores]] = {}  # by the item, of a whole answer
        self._unsent: list[PackedScores] = []  # of tokens that no text has come of yet
        self._score_bytes = 0
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=self._response("in_progress"))

    def write(self, piece: Piece, used: Used) -> Iterator[Sent]:
        self._finish = piece.finish or ""
        self._unsent += piece.scores
        self._score_bytes += held_outputs(piece.scores)
        for event in piece.written():
            if not isinstance(event, Text):
                self._take()  # only the text of messages has logprobs
            for name, data in self._items.write(event):
                if name == "response.output_text.delta":
                    data["logprobs"] = self._logprobs(data["output_index"])
                yield self._event(name, **data)

    def end(self, used: Used) -> Iterator[Sent]:
        cut = self._finish == "length"
        if self._unsent and (last := self._items.nothing_more()) is not None:
            name, data = last  # the end token's, as a rule
            yield self._event(name, **data, logprobs=self._logprobs(data["output_index"]))
        for name, data in self._items.close("incomplete" if cut else "completed"):
            yield self._event(name, **data)
        status = "incomplete" if cut else "completed"
        self._done = self._response(status) | {"usage": _usage(used)}
        if cut:
            self._done["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self._done["completed_at"] = int(time.time())
        yield self._event(f"response.{status}", response=self._done)

    def fail(self, error: ApiError) -> Iterator[Sent]:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        failed = {"error": {"code": code, "message": error.message}}
        yield self._event("response.failed", response=self._response("failed") | failed)

    def answer(self) -> Object:
        """With the logprobs of its text, which events have piece by piece."""
        for index, scores in self._scores.items():
            [part] = self._done["output"][index]["content"]
            part["logprobs"] = Later(partial(self._work.entries, scores))
        return self._done

    def _logprobs(self, index: int) -> list[Object]:
        """Of a delta of item `index`, and of the tokens before it that gave no text."""
        scores = self._take()
        if not self._work.request.logprobs:
            return []
        if self._work.request.stream:
            return list(self._work.entries(scores))
        self._scores.setdefault(index, []).extend(scores)
        return []

    def _take(self) -> list[PackedScores]:
        scores, self._unsent = self._unsent, []
        if self._work.request.stream:
            self._score_bytes = 0
        return scores

    def kept(self) -> int:
        return self._score_bytes + SENT_COPIES * self._items.nbytes

    def _event(self, name: str, /, **data: Any) -> Sent:
        self._number += 1
        return name, {"type": name, "sequence_number": self._number - 1, **data}

    def _response(self, status: str) -> Object:
        """In OpenAI's order, with what was asked for."""
        asked, work = self._asked, self._work
        text, reasoning = asked.text, asked.reasoning
        formatted = text.format if text is not None else None
        format = {"type": "text"} if formatted is None else formatted.model_dump(by_alias=True)
        choice = asked.tool_choice
        return {
            "id": work.id,
            "object": "response",
            "created_at": work.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": None,
            "model": work.limits.served_name,
            "output": self._items.done,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "prompt_cache_key": asked.prompt_cache_key,
            "reasoning": {"effort": reasoning and reasoning.effort, "summary": None},
            "safety_identifier": asked.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": {"format": {k: v for k, v in format.items() if v is not None}},
            "tool_choice": "auto" if choice is None else _plain(choice),
            "tools": self._tools,
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": asked.user,
            "metadata": asked.metadata or {},
        }


def _plain(choice: Any) -> Any:
    return choice if isinstance(choice, str) else choice.model_dump()


def _usage(used: Used) -> Object:
    images = {"image_tokens": used.images} if used.images else {}
    return {
        "input_tokens": used.prompt,
        "input_tokens_details": {"cached_tokens": used.cached, "cache_write_tokens": 0, **images},
        "output_tokens": used.output,
        "output_tokens_details": {"reasoning_tokens": used.reasoning},
        "total_tokens": used.prompt + used.output,
    }


class Items:
    """From what a model writes to output items and their events, without what all events have."""

    def __init__(self, suffix: str, names: Names, call_id: Callable[[], str]) -> None:
        self.done: list[Object] = []
        self._closed = 0  # bytes of these
        self._suffix, self._names, self._call_id = suffix, names, call_id
        self._open: Object | None = None
        self._text = GrowingText()  # of the open item

    def write(self, event: Event) -> Iterator[Sent]:
        if isinstance(event, Text | Reasoning):
            kind = "message" if isinstance(event, Text) else "reasoning"
            if self._open is None or self._open["type"] != kind:
                yield from self._begin(self._message() if kind == "message" else self._reasoning())
            yield self._delta(event.text)
        elif isinstance(event, CallStart):
            yield from self._begin(self._call(event.name))
        elif isinstance(event, CallArguments):
            yield self._delta(event.text)
        elif isinstance(event, CallEnd):
            yield from self.close("completed" if event.complete else "incomplete")

    @property
    def nbytes(self) -> int:
        """Of all items."""
        return self._closed + len(self._text)

    def nothing_more(self) -> Sent | None:
        """An empty delta of the message that is open, if one is."""
        if self._open is None or self._open["type"] != "message":
            return None
        return self._delta("")

    def close(self, status: str = "completed") -> Iterator[Sent]:
        """Ends the open item; `status`: whether all of it is there."""
        if self._open is None:
            return
        self._closed = self.nbytes + ITEM_BYTES
        item, text = self._open, self._text.whole()
        self._open, self._text = None, GrowingText()
        at = self._at(item)
        if item["type"] == "function_call":
            done = {**at, "name": item["name"], "arguments": text}
            yield "response.function_call_arguments.done", done
            whole = {**item, "arguments": text, "status": status}
        else:
            part = {**_part(item), "text": text}
            kind = part["type"]
            inside = {**at, "content_index": 0}
            logged = {name: part[name] for name in ("logprobs",) if name in part}
            yield f"response.{kind}.done", {**inside, "text": text, **logged}
            yield "response.content_part.done", {**inside, "part": part}
            whole = {**item, "content": [part], "status": status}
        self.done.append(whole)
        yield "response.output_item.done", {"output_index": at["output_index"], "item": whole}

    def _begin(self, item: Object) -> Iterator[Sent]:
        yield from self.close()
        self._open = item
        at = self._at(item)
        yield "response.output_item.added", {"output_index": at["output_index"], "item": item}
        if item["type"] != "function_call":
            part = {**at, "content_index": 0, "part": {**_part(item), "text": ""}}
            yield "response.content_part.added", part

    def _delta(self, text: str) -> Sent:
        assert self._open is not None
        part = self._text.add(text)
        at = self._at(self._open)
        if self._open["type"] == "function_call":
            return "response.function_call_arguments.delta", {**at, "delta": part}
        kind = _part(self._open)["type"]
        return f"response.{kind}.delta", {**at, "content_index": 0, "delta": part}

    def _at(self, item: Object) -> Object:
        return {"item_id": item["id"], "output_index": len(self.done)}

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._suffix}_{len(self.done) + (self._open is not None)}"

    def _message(self) -> Object:
        fields = {"status": "in_progress", "role": "assistant", "content": []}
        return {"id": self._id("msg"), "type": "message", **fields}

    def _reasoning(self) -> Object:
        fields = {"status": "in_progress", "summary": [], "content": []}
        return {"id": self._id("rs"), "type": "reasoning", **fields}

    def _call(self, called: str) -> Object:
        namespace, name = self._names.get(called, (None, called))
        fields = {
            "status": "in_progress",
            "arguments": "",
            "call_id": self._call_id(),
        }
        named = {"name": name} if namespace is None else {"name": name, "namespace": namespace}
        return {"id": self._id("fc"), "type": "function_call", **fields, **named}


def _part(item: Object) -> Object:
    """Of a message or of reasoning; its text is left out."""
    if item["type"] == "reasoning":
        return {"type": "reasoning_text"}
    return {"type": "output_text", "annotations": [], "logprobs": []}
