"""A request's messages as its model's chat template gets them: pure, from models to JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from kvline_server.http.body import MAX_VALUES, count_values
from kvline_server.http.chat_tokens import Asked
from kvline_server.http.errors import BadRequest
from kvline_server.http.protocol.chat import Conversation
from kvline_server.http.protocol.messages import ChatMessage, ToolCall
from kvline_server.http.protocol.strict import MAX_DEPTH, check_depth

Object = dict[str, Any]


def rendered(messages: list[ChatMessage]) -> list[Object]:
    """Raises BadRequest for arguments of too many values, by their place."""
    return list(_Conversation().messages(messages))


def asked(request: Conversation) -> Asked:
    """What the template gets beside the messages."""
    return Asked(
        request.generation_prompt(),
        request.continue_final_message,
        request.variables(),
        request.documents,
        [tool.rendered() for tool in request.tools or ()],
    )


class _Conversation:
    """Counts the values of all arguments, which the body's own count does not see in a text."""

    def __init__(self) -> None:
        self._values = 0

    def messages(self, messages: list[ChatMessage]) -> Iterator[Object]:
        for index, message in enumerate(messages):
            made: Object = {"role": message.role, "content": message.shown()}
            if message.name is not None:
                made["name"] = message.name
            if message.tool_call_id is not None:
                made["tool_call_id"] = message.tool_call_id
            if thought := message.thought():
                made |= _thought(thought, message)
            if message.tool_calls:
                calls = enumerate(message.tool_calls)
                place = f"messages[{index}].tool_calls"
                made["tool_calls"] = [self._call(call, f"{place}[{i}]") for i, call in calls]
            yield made

    def _call(self, call: ToolCall, place: str) -> Object:
        """Arguments as an object: templates write them as JSON themselves, or field by field."""
        arguments = self._arguments(call.function.arguments, f"{place}.function.arguments")
        function = {"name": call.function.name, "arguments": arguments}
        return {"id": call.id, "type": call.type, "function": function}

    def _arguments(self, text: str, place: str) -> Object:
        """Of a key that stands twice the last value counts, and what is no object is the text of
        one: the model wrote it, and a client cannot take it back. An empty text is a call without
        arguments."""
        self._values += count_values(text.encode(), MAX_VALUES - self._values)
        if self._values >= MAX_VALUES:
            wrong = (
                f"the arguments of all calls have more than {MAX_VALUES} texts, lists and objects"
            )
            raise BadRequest(f"{place}: {wrong}", place)
        return _object(text) if text else {}


def _object(text: str) -> Object:
    """At most MAX_DEPTH deep, of finite numbers, without halves of surrogate pairs."""
    try:
        value = json.loads(text, parse_constant=no_number, parse_float=_number)
        if not isinstance(value, dict):
            raise ValueError
        check_depth(value, MAX_DEPTH)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return {"arguments": text}  # cut by the limit, or a mistake of the model's
    return value


def _thought(text: str, message: ChatMessage) -> Object:
    """Under each name that a template may read it by. gpt-oss takes no `thinking` beside content
    in a message with calls."""
    made = {"reasoning": text, "reasoning_content": text}
    return made if message.tool_calls and message.text() else {**made, "thinking": text}


def no_number(text: str) -> float:
    """NaN and Infinity are none in JSON, though Python reads them."""
    raise ValueError(text)


def _number(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else no_number(text)
