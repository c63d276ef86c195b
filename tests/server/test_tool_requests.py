"""What a request may say of tools, calls, reasoning and the form of an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvline_server.http.conversation import rendered
from kvline_server.http.errors import BadRequest
from kvline_server.http.protocol.chat import ChatRequest
from kvline_server.http.protocol.strict import parse
from kvline_server.http.protocol.tools import MAX_TOOL_BYTES, MAX_TOOLS, NO_PARAMETERS

Fields = dict[str, Any]
USER: Fields = {"role": "user", "content": "a"}
SCHEMA: Fields = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL: Fields = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "f", "arguments": '{"city": "Paris"}'},
}
RESULT: Fields = {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}


def chat(**fields: Any) -> ChatRequest:
    return parse(ChatRequest, {"model": "m", "messages": [USER], **fields})


def function(**fields: Any) -> list[Fields]:
    return [{"type": "function", "function": {"name": "f", **fields}}]


def answer(**fields: Any) -> list[Fields]:
    return [USER, {"role": "assistant", **fields}]


DEEP: Fields = {}
for _ in range(64):
    DEEP = {"items": DEEP}

TAKEN: list[Fields] = [
    {"tools": []},
    {"tools": function(description="", parameters=SCHEMA, strict=False), "tool_choice": "none"},
    {"tools": function(description=None, parameters=None, strict=None), "tool_choice": "none"},
    {"tools": [{**function()[0], "cache_control": {"type": "ephemeral"}}], "tool_choice": "none"},
    {"tools": function(name="mcp__server.a-b_c"), "tool_choice": "none"},
    {"tools": [], "tool_choice": "none", "parallel_tool_calls": False},
    {"tool_choice": "auto", "parallel_tool_calls": True},
    {"messages": [*answer(tool_calls=[CALL]), RESULT]},
    {"messages": [*answer(tool_calls=[CALL], content=None), {**RESULT, "name": "f"}]},
    {"messages": [*answer(tool_calls=[CALL], content="Wait."), {**RESULT, "content": [
        {"type": "text", "text": "sunny", "cache_control": {"type": "ephemeral"}}]}]},
    {"messages": answer(content="b", tool_calls=[], reasoning="c", reasoning_content="c")},
    # As clients dump the answer that they had.
    {"messages": answer(content=None, tool_calls=[{**CALL, "index": 0}], refusal=None, audio=None,
                        function_call=None, annotations=[], parsed=None)},
    {"messages": answer(content='{"a": 1}', parsed={"a": 1}, tool_calls=None)},
    {"messages": answer(tool_calls=[{**CALL, "function": {
        **CALL["function"], "parsed_arguments": {"city": "Paris"}}}])},
    {"reasoning_effort": "none"},
    {"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "high"}},
    {"response_format": {"type": "text"}},
    {"tools": function(), "tool_choice": "auto", "parallel_tool_calls": False},
    {"tools": function()},
    {"include_reasoning": False, "thinking_token_budget": 100.0},
]  # fmt: skip


@pytest.mark.parametrize("fields", TAKEN, ids=lambda fields: json.dumps(fields)[:60])
def test_what_clients_send_is_taken(fields: Fields) -> None:
    request = chat(**fields)
    assert len(rendered(request.messages)) == len(request.messages)


WRONG: list[tuple[Fields, str, str]] = [
    ({"tools": {}}, "tools", "must be a list"),
    ({"tools": [5]}, "tools[0]", "must be an object"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "is required"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "must be function; no other tools"),
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type", "must be function"),
    ({"tools": [{"type": 5}]}, "tools[0].type", "function"),
    ({"tools": function(name="a b")}, "tools[0].function.name", "should match pattern"),
    ({"tools": function(name="")}, "tools[0].function.name", "should match pattern"),
    ({"tools": function(name="x" * 129)}, "tools[0].function.name", "should match pattern"),
    ({"tools": function(description=5)}, "tools[0].function.description", "must be a string"),
    ({"tools": function(parameters=[])}, "tools[0].function.parameters", "must be an object"),
    ({"tools": function(parameters=DEEP)}, "tools[0].function.parameters", "more than 64 deep"),
    ({"tools": function(strict="yes")}, "tools[0].function.strict", "must be true or false"),
    ({"tools": function(other=1)}, "tools[0].function.other", "is not a field"),
    ({"tools": function() * 2}, "tools[1].function.name", "another tool has this name"),
    ({"tools": function() * (MAX_TOOLS + 1)}, "tools", "more than 256 items"),
    ({"tools": function(description="x" * MAX_TOOL_BYTES)}, "tools", "more than 524288 characters"),
    ({"tool_choice": "required"}, "tool_choice", "required needs tools"),
    ({"tool_choice": "any"}, "tool_choice", "'none', 'auto' or 'required'"),
    ({"tool_choice": 5}, "tool_choice", "'none', 'auto' or 'required'"),
    ({"tool_choice": {"type": "custom"}}, "tool_choice.type", "must be function; no other choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function", "is required"),
    (
        {"tools": function(), "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice.function.name",
        "is none of the tools",
    ),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls", "must be true or false"),
    ({"reasoning_effort": "extreme"}, "reasoning_effort", "'none', 'minimal', 'low'"),
    (
        {"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "low"}},
        "reasoning_effort",
        "not together with another in chat_template_kwargs",
    ),
    ({"thinking_token_budget": -1}, "thinking_token_budget", "from 0 to"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id", "a tool's"),
    ({"messages": [{**RESULT, "content": None}]}, "messages[0].content", "only an assistant's"),
    ({"messages": [{**USER, "tool_call_id": "a"}]}, "messages[0].tool_call_id", "and no other"),
    ({"messages": [{**USER, "tool_calls": [CALL]}]}, "messages[0].tool_calls", "only an assist"),
    ({"messages": [{**USER, "reasoning": "a"}]}, "messages[0].reasoning", "only an assistant's"),
    (
        {"messages": answer(reasoning="a", reasoning_content="b")},
        "messages[1].reasoning",
        "not together with another reasoning_content",
    ),
    ({"messages": answer(tool_calls=[{}])}, "messages[1].tool_calls[0].id", "is required"),
    (
        {"messages": answer(tool_calls=[{**CALL, "function": {"name": "f", "arguments": {}}}])},
        "messages[1].tool_calls[0].function.arguments",
        "must be a string",
    ),
    (
        {"messages": answer(tool_calls=[{**CALL, "type": "custom"}])},
        "messages[1].tool_calls[0].type",
        "'function'",
    ),
    ({"messages": answer(tool_calls=[CALL] * 129)}, "messages[1].tool_calls", "more than 128"),
    ({"response_format": "json"}, "response_format", "must be an object"),
    ({"response_format": {}}, "response_format.type", "is required"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "'json_schema'"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "with type"),
    (
        {"response_format": {"type": "text", "json_schema": {"name": "a", "schema": {}}}},
        "response_format.json_schema",
        "with type json_schema, and with no other",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name",
        "is required",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 5}}},
        "response_format.json_schema.schema",
        "must be an object",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": DEEP}}},
        "response_format.json_schema.schema",
        "more than 64 deep",
    ),
    ({"response_format": {"type": "structural_tag"}}, "response_format.type", "alone has format"),
    (
        {"response_format": {"type": "structural_tag", "triggers": ["a"]}},
        "response_format.type",
        "structures and triggers",
    ),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one of json, regex"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "must not be empty"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json", "an object or a string"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object", "True"),
    ({"structured_outputs": {"regex": "a" * 300_000}}, "structured_outputs.regex", "262144"),
    ({"guided_json": {}}, "guided_json", "is not a field"),
]


@pytest.mark.parametrize(("fields", "param", "says"), WRONG, ids=lambda value: str(value)[:40])
def test_what_is_wrong_is_named(fields: Fields, param: str, says: str) -> None:
    with pytest.raises(BadRequest) as refused:
        chat(**fields)
    assert refused.value.param == param
    assert refused.value.message.startswith(f"{param}: ") and says in refused.value.message
    assert len(refused.value.message) < 500


def test_tools_are_rendered_in_one_order_without_what_is_not_the_model_s() -> None:
    """A prompt that differs in the order of keys would not be in the prefix cache."""
    fields = {"strict": False, "parameters": SCHEMA, "description": "d", "name": "f"}
    [one] = chat(tools=[{"function": fields, "type": "function"}]).tools or []
    expected = {"name": "f", "description": "d", "parameters": SCHEMA}
    assert json.dumps(one.rendered()) == json.dumps({"type": "function", "function": expected})
    [bare] = chat(tools=function()).tools or []
    assert bare.rendered()["function"] == {"name": "f", "parameters": NO_PARAMETERS}


def test_reasoning_and_calls_reach_the_template_by_the_names_it_may_read() -> None:
    for given in ({"reasoning": "hm"}, {"reasoning_content": "hm"}):
        [_, answered] = rendered(chat(messages=answer(content="b", **given)).messages)
        assert answered == {"role": "assistant", "content": "b"} | dict.fromkeys(
            ("reasoning", "reasoning_content", "thinking"), "hm"
        )
    with_calls = answer(content="b", reasoning="hm", tool_calls=[CALL])
    [_, answered, result] = rendered(chat(messages=[*with_calls, RESULT]).messages)
    assert "thinking" not in answered  # gpt-oss takes one of the two
    call = {"id": "call_1", "type": "function"}
    assert answered["tool_calls"] == [
        {**call, "function": {"name": "f", "arguments": {"city": "Paris"}}}
    ]
    assert result == {"role": "tool", "content": "sunny", "tool_call_id": "call_1"}


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({}, {}),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            {"reasoning_effort": "none", "enable_thinking": True},
        ),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
    ],
)
def test_the_effort_is_a_variable_of_the_template(fields: Fields, variables: Fields) -> None:
    assert chat(**fields).variables() == variables
