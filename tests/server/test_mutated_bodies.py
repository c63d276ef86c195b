"""Bodies of every kind of request with one part replaced: each is taken, or refused by name."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvline_server.http import anthropic_request, responses_request
from kvline_server.http.conversation import asked, rendered
from kvline_server.http.errors import BadRequest
from kvline_server.http.protocol.anthropic import MessagesRequest
from kvline_server.http.protocol.chat import ChatRequest
from kvline_server.http.protocol.responses import ResponsesRequest
from kvline_server.http.protocol.strict import parse
from kvline_server.http.renderers import as_job

EXAMPLES = int(os.environ.get("KVLINE_TEST_EXAMPLES", "150"))  # of each kind
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["b"]}}}
PARTS: list[Any] = [None, True, 0, -1, 1.5, 8.0, 10**30, "", "x", "{}", "\x00", [], {}, [[]], [{}]]
PARTS += [{"type": "text"}, {"type": "x"}, {"type": 5}, {"": 0}, "x" * 300, [None], {"type": None}]

CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "a", "cache_control": {"b": "c"}}]},
        {"role": "user", "content": "b", "name": "c"},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "d",
            "tool_calls": [
                {
                    "id": "e",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"g": [1, {"h": null}]}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "e", "content": "i"},
    ],
    "tools": [
        {
            "type": "function",
            "function": {"name": "f", "description": "d", "parameters": SCHEMA, "strict": False},
        }
    ],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    "structured_outputs": {"choice": ["a"], "disable_any_whitespace": True},
    "reasoning_effort": "low",
    "chat_template_kwargs": {"a": 1},
    "stream_options": {"include_usage": True},
}
RESPONSES: dict[str, Any] = {
    "model": "m",
    "instructions": "a",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "c"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "d"}]},
        {"type": "function_call", "call_id": "e", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "e", "output": "g"},
    ],
    "tools": [
        {"type": "function", "name": "f", "parameters": SCHEMA},
        {
            "type": "namespace",
            "name": "n",
            "description": "d",
            "tools": [{"type": "function", "name": "f"}],
        },
        {"type": "web_search"},
    ],
    "tool_choice": {"type": "function", "name": "f"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
}
MESSAGES: dict[str, Any] = {
    "model": "m",
    "max_tokens": 5,
    "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "c", "signature": ""},
                {"type": "text", "text": "d"},
                {"type": "tool_use", "id": "e", "name": "f", "input": {"g": [1]}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "e", "content": "h"}]},
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
    "stop_sequences": ["x"],
    "metadata": {"user_id": "u"},
}
KINDS: dict[str, tuple[dict[str, Any], Callable[[dict[str, Any]], ChatRequest]]] = {
    "chat": (CHAT, lambda body: parse(ChatRequest, body)),
    "responses": (
        RESPONSES,
        lambda body: responses_request.to_chat(parse(ResponsesRequest, body))[0],
    ),
    "messages": (MESSAGES, lambda body: anthropic_request.to_chat(parse(MessagesRequest, body))[0]),
}
Path = list[str | int]


def places(value: Any, path: Path) -> Iterator[Path]:
    """Of every part of a body."""
    items: Any = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield [*path, key]
        if isinstance(inner, dict | list):
            yield from places(inner, [*path, key])


def replaced(body: dict[str, Any], path: Path, part: Any) -> dict[str, Any]:
    made = copy.deepcopy(body)
    at: Any = made
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = part
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_a_body_with_a_part_replaced_is_taken_or_refused_by_name(kind: str) -> None:
    body, read = KINDS[kind]
    read(body)
    every = list(places(body, []))

    @settings(max_examples=EXAMPLES, deadline=None)
    @given(
        st.lists(st.tuples(st.sampled_from(every), st.sampled_from(PARTS)), min_size=1, max_size=2)
    )
    def check(changes: list[tuple[Path, Any]]) -> None:
        made = body
        for path, part in changes:
            try:
                made = replaced(made, path, part)
            except (KeyError, IndexError, TypeError):
                return  # the place has gone with what is around it
        try:
            request = read(made)
            given = asked(request)
            job = as_job(rendered(request.messages), {}, {"tools": given.tools, **given.variables})
            assert json.loads(job)["messages"]
        except BadRequest as refused:
            assert refused.param and refused.code and len(refused.message) < 500
            assert refused.message.startswith(refused.param[:50])

    check()
