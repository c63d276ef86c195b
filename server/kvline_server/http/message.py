"""An answer as an assistant's message of OpenAI's chat, whole and as the deltas of a stream."""

from __future__ import annotations

import secrets
import string
from typing import Any

from kvline_server.formats.events import CallArguments, CallStart, Event, Reasoning, Text
from kvline_server.formats.format import MISTRAL_V7, MISTRAL_V11
from kvline_server.http.answering import Answering
from kvline_server.http.pieces import Answer

Object = dict[str, Any]
# Their templates take no other ids of calls than nine letters and digits.
NINE = (MISTRAL_V7, MISTRAL_V11)
LETTERS = string.ascii_letters + string.digits


def call_id(model: Answering, prefix: str = "call_") -> str:
    """Of one call, which no other has."""
    if model.format in NINE:
        return "".join(secrets.choice(LETTERS) for _ in range(9))
    return prefix + secrets.token_hex(12)


def message(answer: Answer, model: Answering) -> Object:
    made: Object = {"role": "assistant", "content": answer.text}
    if thought := answer.thought.getvalue():
        made |= _reasoning(thought)
    if answer.calls:
        made["content"] = answer.text or None
        made["tool_calls"] = [
            _call(call_id(model), call.name, call.arguments.getvalue()) for call in answer.calls
        ]
    return made


def delta(event: Event, model: Answering) -> Object | None:
    """None for what a stream does not show."""
    if isinstance(event, Text):
        return {"content": event.text}
    if isinstance(event, Reasoning):
        return _reasoning(event.text)
    if isinstance(event, CallStart):
        return {"tool_calls": [{"index": event.index} | _call(call_id(model), event.name, "")]}
    if isinstance(event, CallArguments):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    return None


def _reasoning(text: str) -> Object:
    """By both names that clients read."""
    return {"reasoning": text, "reasoning_content": text}


def _call(id: str, name: str, arguments: str) -> Object:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
