"""What is read from the answers to a chat, by its request and its model."""

from __future__ import annotations

from typing import Any

import pytest
from waiting import within

from kvline_server.formats.detect import NoFormat
from kvline_server.formats.events import CallStart, Text
from kvline_server.formats.format import HARMONY, HERMES, QWEN_XML, THINK
from kvline_server.formats.tools import Tool
from kvline_server.formats.typed import kind, typed
from kvline_server.http.answering import Answering
from kvline_server.http.errors import BadRequest
from kvline_server.http.protocol.chat import ChatRequest
from kvline_server.http.protocol.strict import parse
from kvline_server.http.reading import Reading, budget, reading

Fields = dict[str, Any]
MARKS = {"<think>": 7, "</think>": 8}
QWEN = Answering(HERMES, THINK, MARKS)
PLAIN = Answering(HERMES)
USER: Fields = {"role": "user", "content": "a"}
# By what they say of a value: types, lists, references, nothing, and too much.
PARAMETERS: Fields = {
    "s": {"type": "string"},
    "i": {"type": ["integer", "null"]},
    "e": {"enum": ["a", 10, None]},
    "c": {"const": "true"},
    "any": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "ref": {"$ref": "#/$defs/n"},
    "listed": {"$ref": "#/$defs/l"},
    "loop": {"$ref": "#/$defs/loop"},
    "hint": {"minimum": 1},
    "none": {},
    "true": True,
}
SHARED: Fields = {
    "n": {"type": "number"},
    "l": {"enum": ["10", "null"]},
    "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"$ref": "#/$defs/loop"}]},
}
SCHEMA: Fields = {"type": "object", "properties": PARAMETERS, "$defs": SHARED}


def asked(**fields: Any) -> ChatRequest:
    return parse(ChatRequest, {"model": "m", "messages": [USER], **fields})


def offered(parameters: Fields | None = None, **fields: Any) -> list[Fields]:
    function = {"name": "f", "parameters": SCHEMA if parameters is None else parameters}
    return [{"type": "function", "function": function | fields}]


def found(model: Answering, prompt: str = "a", **fields: Any) -> Reading:
    made = reading(asked(**fields), model, prompt)
    assert made is not None
    return made


def test_an_answer_is_text_where_nothing_can_be_read_from_it() -> None:
    assert reading(asked(), PLAIN, "a") is None
    assert reading(asked(tools=offered(), tool_choice="none"), PLAIN, "a") is None
    assert reading(asked(), Answering(), "a") is None
    assert found(QWEN).reads.tools == ()
    assert found(Answering(HARMONY)).reads.format is HARMONY
    assert [tool.name for tool in found(PLAIN, tools=offered()).reads.tools] == ["f"]


def test_only_what_a_grammar_writes_is_a_call_where_one_guarantees_them() -> None:
    named = {"type": "function", "function": {"name": "f"}}
    free: list[Fields] = [{"tool_choice": "auto"}, {"response_format": {"type": "text"}}]
    for fields in free:
        assert not found(PLAIN, tools=offered(), **fields).reads.constrained
    for fields in (
        {"tools": offered(), "tool_choice": "required"},
        {"tools": offered(), "tool_choice": named},
        {"tools": offered(strict=True)},
        {"tools": offered(), "response_format": {"type": "json_object"}},
        {"tools": offered(), "structured_outputs": {"regex": "a"}},
    ):
        assert found(PLAIN, **fields).reads.constrained


def test_a_mark_that_our_grammar_never_writes_begins_no_call_within_a_form() -> None:
    written = '{"a": "<function=f></function>"}'
    form = {"type": "json_object"}
    made = found(Answering(QWEN_XML), tools=offered(), response_format=form).parser()
    events = [*made.feed([(5, written)]), *made.end("stop")]
    assert "".join(each.text for each in events if isinstance(each, Text)) == written
    assert not any(isinstance(each, CallStart) for each in events)


def test_a_request_may_want_one_call_and_no_reasoning() -> None:
    assert not found(QWEN).one_call and found(QWEN).shows_reasoning
    made = found(QWEN, parallel_tool_calls=False, include_reasoning=False)
    assert made.one_call and not made.shows_reasoning


@pytest.mark.parametrize(
    ("prompt", "last", "begins"),
    [
        ("user: a\nassistant:<think>\n", None, True),
        ("user: a\nassistant:", None, False),
        ("user: a\nassistant:<think>b", "<think>b", True),
        ("user: a\nassistant:<think>b</think>c", "<think>b</think>c", False),
        ("user: a\nassistant:b", "b", False),
    ],
)
def test_an_answer_may_begin_in_reasoning(prompt: str, last: str | None, begins: bool) -> None:
    fields: Fields = {}
    if last is not None:
        messages = [USER, {"role": "assistant", "content": last}]
        fields = {"messages": messages, "continue_final_message": True}
    made = found(QWEN, prompt, **fields)
    assert made.reads.in_reasoning is begins
    thinking = budget(asked(thinking_token_budget=3), QWEN, made)
    assert thinking is not None
    assert (thinking.tokens, thinking.end) == (3, 8)
    assert thinking.begin == (None if begins else 7)


@pytest.mark.parametrize("model", [PLAIN, Answering(HARMONY), Answering(HERMES, THINK)])
def test_a_budget_needs_marks_that_are_tokens(model: Answering) -> None:
    assert budget(asked(), model, None) is None
    with pytest.raises(BadRequest, match="no budget can end it") as refused:
        budget(asked(thinking_token_budget=3), model, None)
    assert refused.value.param == "thinking_token_budget"


@pytest.mark.parametrize("reason", list(NoFormat))
def test_tools_whose_calls_nothing_reads_are_refused(reason: NoFormat) -> None:
    with pytest.raises(BadRequest) as refused:
        reading(asked(tools=offered()), Answering(reason), "a")
    assert str(reason) in refused.value.message and refused.value.param == "tools"


def test_what_is_kept_of_a_tool_types_values_as_all_of_it_does() -> None:
    [kept] = found(Answering(QWEN_XML), tools=offered()).reads.tools
    assert kept.properties().keys() == PARAMETERS.keys()
    for name, schema in PARAMETERS.items():
        less = kept.properties()[name]
        assert kind(less, kept.parameters) == kind(schema, SCHEMA), name
        for text in ("10", "null", "true", "a", "[1]", " 1.5 ", ""):
            shown = typed(text, less, kept.parameters)
            assert shown == typed(text, schema, SCHEMA), (name, text)
    assert found(PLAIN, tools=offered()).reads.tools == (Tool("f", {}),)


def test_types_of_many_parameters_take_a_bounded_time() -> None:
    wide = {"anyOf": [{"$ref": "#/$defs/b"}] * 150}
    one = {"anyOf": [{"$ref": "#/$defs/a"}]}
    schema = {
        "$defs": {"a": wide, "b": {"type": "string"}},
        "properties": {f"p{i}": one for i in range(5000)},
    }
    request = asked(tools=offered(schema))
    with within(0.5):
        made = reading(request, Answering(QWEN_XML), "a")
    assert made is not None and 5000 * 400 < made.held < 4 << 20
