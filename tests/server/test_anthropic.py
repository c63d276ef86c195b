"""/v1/messages: what a request means as a chat, and its answers as Anthropic has them."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from scripted import Scripted

from kvline_server.formats.events import (
    CallArguments,
    CallEnd,
    CallStart,
    Event,
    Reasoning,
    Text,
)
from kvline_server.http.anthropic import Messages
from kvline_server.http.anthropic_request import BILLING, to_chat
from kvline_server.http.body import MAX_VALUES
from kvline_server.http.conversation import rendered
from kvline_server.http.errors import BadRequest, EngineFailed, NotFound, TooMany, Unavailable
from kvline_server.http.fields import named
from kvline_server.http.generate import RequestLimits
from kvline_server.http.later import encode
from kvline_server.http.pieces import Piece
from kvline_server.http.protocol.anthropic import MessagesRequest
from kvline_server.http.protocol.chat import ChatRequest
from kvline_server.http.protocol.strict import parse
from kvline_server.http.translated import Sent, Used

Fields = dict[str, Any]
USER: Fields = {"role": "user", "content": "hi"}
USED: Fields = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
TOOL: Fields = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
DEEP: Any = json.loads("[" * 64 + "]" * 64)
CACHED: Fields = {"cache_control": {"type": "ephemeral"}}


def asked(**fields: Any) -> ChatRequest:
    body = {"model": "tiny", "max_tokens": 5, "messages": [USER], **fields}
    return to_chat(parse(MessagesRequest, body))[0]


def messages(**fields: Any) -> list[Fields]:
    return [m.model_dump(exclude_none=True) for m in asked(**fields).messages]


def block(text: str, **more: Any) -> Fields:
    return {"type": "text", "text": text, **more}


def image(**source: Any) -> Fields:
    return {"type": "image", "source": source}


def result(*content: Fields) -> Fields:
    return {"type": "tool_result", "tool_use_id": "t1", "content": list(content)}


PNG_AS_JPEG = image(type="base64", media_type="image/jpeg", data="iVBORw0KGgoAAAANSUhEUg==")


def test_system_texts_are_one_message_without_what_changes_each_time() -> None:
    """Claude Code's first text differs in each request: no prompt would be in the prefix cache."""
    system = [block(f"{BILLING}: cch=1"), block("Be brief.", **CACHED), block("In English.")]
    assert messages(system=system)[0] == {"role": "system", "content": "Be brief.\n\nIn English."}
    text = f"{BILLING}: cch=1\nBe brief."
    assert messages(system=text)[0] == {"role": "system", "content": "Be brief."}
    system = [block("Be brief."), block(f"{BILLING} is a header.")]
    assert BILLING in messages(system=system)[0]["content"]
    assert messages(system="Be brief.")[0] == {"role": "system", "content": "Be brief."}
    assert messages() == [USER]


def test_a_system_message_stays_where_it_is() -> None:
    """At the front it would change the prompt before all that is cached."""
    found = messages(messages=[USER, {"role": "system", "content": [block("2 left")]}, USER])
    assert [m["role"] for m in found] == ["user", "system", "user"]


def test_blocks_are_messages_of_a_chat() -> None:
    history = [
        {"role": "user", "content": [block("a"), block("b", **CACHED)]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "redacted_thinking", "data": "x"},
            block("Wait.", citations=None),
            {"type": "tool_use", "id": "t1", "name": "f", "input": {"é": [1]}, **CACHED},
            {"type": "tool_use", "id": "t2", "name": "g", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": "sunny", **CACHED},
            {"type": "tool_result", "tool_use_id": "t2", "is_error": True,
             "content": [block("no"), block("ne")]},
            block("And?"),
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t3"},
            {"type": "tool_result", "tool_use_id": "t4", "is_error": True},
        ]},
    ]  # fmt: skip
    first, answered, one, two, more, three, four = asked(messages=history).messages
    assert first.text() == "ab" and more.text() == "And?"
    assert (answered.text(), answered.thought()) == ("Wait.", "hm")
    calls = [(c.id, c.function.name, c.function.arguments) for c in answered.tool_calls or ()]
    assert calls == [("t1", "f", '{"é": [1]}'), ("t2", "g", "{}")]
    results = [(m.role, m.tool_call_id, m.text()) for m in (one, two, three, four)]
    assert results == [
        ("tool", "t1", "sunny"),
        ("tool", "t2", "Error: none"),
        ("tool", "t3", ""),
        ("tool", "t4", "Error"),
    ]


def test_settings_are_those_of_a_chat() -> None:
    made = asked(
        max_tokens=7.0, stop_sequences=["a"], stream=True, temperature=0, top_p=0.5, top_k=4,
        metadata={"user_id": "u"}, service_tier="auto", mcp_servers=[], context_management={},
        tools=[TOOL, {"type": "web_search_20250305", "name": "web_search"}],
        tool_choice={"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 100}, **CACHED,
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": {}}},
    )  # fmt: skip
    assert (made.most(), made.stops(), made.stream) == (7, ["a"], True)
    assert (made.temperature, made.top_p, made.top_k, made.user) == (0, 0.5, 4, "u")
    assert made.tool_choice is not None and not isinstance(made.tool_choice, str)
    assert made.parallel_tool_calls is False and made.thinking_token_budget == 100
    assert made.variables() == {"reasoning_effort": "low", "enable_thinking": True}
    assert made.response_format is not None and made.response_format.type == "json_schema"
    [only] = made.tools or []
    assert (only.function.name, only.function.parameters) == ("f", {"type": "object"})
    for kind, choice in {"auto": "auto", "any": "required", "none": "none"}.items():
        assert asked(tools=[TOOL], tool_choice={"type": kind}).tool_choice == choice
    assert asked(thinking={"type": "disabled"}).variables() == {"enable_thinking": False}


def test_an_answer_that_was_begun_goes_on() -> None:
    begun = {"role": "assistant", "content": "The answer is"}
    assert asked(messages=[USER, begun]).continue_final_message
    assert not asked(messages=[USER, begun, USER]).continue_final_message


WRONG: list[tuple[Fields, str, str]] = [
    ({"max_tokens": None}, "max_tokens", "missing_required_parameter"),
    ({"max_tokens": 0}, "max_tokens", "integer_below_min_value"),
    ({"n": 2}, "n", "unknown_parameter"),
    ({"container": "c"}, "container", "unsupported_value"),
    ({"messages": []}, "messages", "empty_array"),
    ({"messages": [5]}, "messages[0]", "invalid_type"),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role", "invalid_value"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages[0].content[0].source.type",
        "missing_required_parameter",
    ),
    (
        {"messages": [{"role": "user", "content": [image(type="url", url="https://a.b")]}]},
        "messages[0].content[0].source.type",
        "unsupported_value",
    ),
    (
        {"messages": [{"role": "user", "content": [result(image(type="file", file_id="f"))]}]},
        "messages[0].content[0].content[0].source.type",
        "unsupported_value",
    ),
    (
        {"messages": [{"role": "user", "content": [image(type="base64", media_type="image/bmp")]}]},
        "messages[0].content[0].source.media_type",
        "invalid_value",
    ),
    (
        {"messages": [{"role": "user", "content": [PNG_AS_JPEG]}]},
        "messages[0].content[0].source.media_type",
        "invalid_value",
    ),
    (
        {"messages": [{"role": "assistant", "content": [PNG_AS_JPEG]}]},
        "messages[0].content[0].type",
        "unsupported_value",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        "messages[0].content[0].tool_use_id",
        "missing_required_parameter",
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]},
        "messages[0].content[0].name",
        "missing_required_parameter",
    ),
    ({"system": [{"type": "image"}]}, "system[0].type", "unsupported_value"),
    ({"tools": [{**TOOL, "type": "bash_20250124"}]}, "tools[0].type", "unsupported_value"),
    ({"tools": [{"type": "web_search_x", "a": DEEP}]}, "tools[0]", "invalid_value"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "missing_required_parameter"),
    ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "invalid_value"),
    # What only the chat finds has this API's names, and its places.
    (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}, TOOL, TOOL]},
        "tools[2].name",
        "invalid_value",
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}},
        "tool_choice.name",
        "invalid_value",
    ),
    ({"tool_choice": {"type": "any"}}, "tool_choice", "invalid_value"),
    (
        {"system": "a", "messages": [USER, {"role": "assistant", "content": [USED] * 129}]},
        "messages[1]",
        "array_above_max_length",
    ),
    (
        {"thinking": {"type": "disabled", "budget_tokens": 5}},
        "thinking.budget_tokens",
        "invalid_value",
    ),
]


@pytest.mark.parametrize(("fields", "param", "code"), WRONG, ids=lambda value: str(value)[:40])
def test_what_is_wrong_is_named(fields: Fields, param: str, code: str) -> None:
    with pytest.raises(BadRequest) as refused:
        asked(**fields)
    assert (refused.value.param, refused.value.code) == (param, code)
    assert refused.value.message.startswith(f"{param}: ")


def test_a_call_whose_arguments_have_too_many_values_is_named() -> None:
    large = {**USED, "input": {"a": [[]] * MAX_VALUES}}
    given = [USER, {"role": "assistant", "content": [block("Wait."), USED, large]}]
    body = {"model": "tiny", "max_tokens": 5, "messages": given}
    chat, fields = to_chat(parse(MessagesRequest, body))
    with pytest.raises(BadRequest) as refused, named(fields.of):
        rendered(chat.messages)
    assert refused.value.param == "messages[1].content[2]"


def played(events: list[Event], finish: str, stop: str | None = None) -> tuple[list[Sent], Fields]:
    """The events of a stream, and the whole answer."""
    made = Messages()
    body = {"model": "tiny", "max_tokens": 5, "messages": [USER]}
    limits = RequestLimits("tiny", 307, 256, 20, 256)
    ids = itertools.count()
    work: Any = SimpleNamespace(
        id="msg_x",
        request=made.read(body),
        limits=limits,
        call_id=lambda prefix: f"{prefix}{next(ids)}",
    )
    sent = list(made.begin(work))
    for index, event in enumerate(events):
        piece = Piece()
        piece.write(event)
        if index == len(events) - 1:
            piece.finish, piece.stop = finish, stop
        sent += made.write(piece, Used(9, 4, 1))
    sent += made.end(Used(9, 4, 7))
    assert all(name == data["type"] for name, data in sent)
    sent = [(name, json.loads(msgspec.json.encode(data))) for name, data in sent]
    return sent, json.loads(b"".join(encode(made.answer())))


def test_events_come_in_anthropic_s_order() -> None:
    events: list[Event] = [
        *(Reasoning("h"), Reasoning("m"), Text("Wai"), Text("t.")),
        *(CallStart(0, "f"), CallArguments(0, '{"a"'), CallArguments(0, ": 1}"), CallEnd(0, True)),
        *(CallStart(1, "g"), CallEnd(1, True)),
    ]
    sent, whole = played(events, "tool_calls")
    started = ("message_start", None)
    assert [(name, data.get("index")) for name, data in sent] == [
        started,
        *[("content_block_start", 0), *[("content_block_delta", 0)] * 2, ("content_block_stop", 0)],
        *[("content_block_start", 1), *[("content_block_delta", 1)] * 2, ("content_block_stop", 1)],
        *[("content_block_start", 2), *[("content_block_delta", 2)] * 2, ("content_block_stop", 2)],
        *[("content_block_start", 3), ("content_block_stop", 3)],
        *[("message_delta", None), ("message_stop", None)],
    ]
    deltas = [data["delta"] for name, data in sent if name == "content_block_delta"]
    assert [delta["type"] for delta in deltas[::2]] == [
        "thinking_delta",
        "text_delta",
        "input_json_delta",
    ]
    assert "".join(delta["partial_json"] for delta in deltas[4:]) == '{"a": 1}'
    start, end = sent[0][1]["message"], sent[-2][1]
    assert start["content"] == [] and start["stop_reason"] is None
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    thought, text, call, other = whole["content"]
    assert thought == {"type": "thinking", "thinking": "hm", "signature": ""}
    assert text == {"type": "text", "text": "Wait."}
    assert (call["name"], call["input"], other["name"], other["input"]) == ("f", {"a": 1}, "g", {})
    assert call["id"] != other["id"] and call["id"].startswith("toolu_")
    ids = [d["content_block"].get("id") for n, d in sent if n == "content_block_start"]
    assert ids[2:] == [call["id"], other["id"]]
    assert (
        whole["usage"]
        == end["usage"]
        == {
            "input_tokens": 5,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": 7,
        }
    )
    assert start["usage"] == {**whole["usage"], "output_tokens": 0}


CUT: list[Event] = [CallStart(0, "f"), CallArguments(0, '{"a')]
CALLED: list[Event] = [CallStart(0, "f"), CallArguments(0, "{}"), CallEnd(0, True)]
NO_JSON: list[Event] = [
    *(CallStart(0, "f"), CallArguments(0, '{"a": [NaN, -Infinity]}'), CallEnd(0, False)),
    *(CallStart(1, "f"), CallEnd(1, True)),
]


@pytest.mark.parametrize(
    ("events", "finish", "stop", "reason"),
    [
        ([Text("a")], "stop", None, "end_turn"),
        ([Text("a")], "stop", "\n", "stop_sequence"),
        ([Text("a")], "length", None, "max_tokens"),
        (CUT, "length", None, "max_tokens"),
        (NO_JSON, "tool_calls", None, "tool_use"),
        ([*CALLED, Text("a")], "tool_calls", "\n", "tool_use"),
    ],
)
def test_the_reason_of_an_end_is_named(
    events: list[Event],
    finish: str,
    stop: str | None,
    reason: str,
) -> None:
    sent, whole = played(events, finish, stop)
    expected = {"stop_reason": reason, "stop_sequence": stop if reason == "stop_sequence" else None}
    assert expected.items() <= whole.items() and sent[-2][1]["delta"] == expected
    assert whole["content"][0].get("input", {}) == {}, "nothing of a cut object is invented"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BadRequest("x"), "invalid_request_error"),
        (NotFound("x"), "not_found_error"),
        (TooMany("x"), "rate_limit_error"),
        (EngineFailed("x"), "api_error"),
        (Unavailable("x"), "overloaded_error"),
    ],
)
def test_an_error_is_an_event_in_anthropic_s_form(error: Any, kind: str) -> None:
    [sent] = Messages().fail(error)
    assert sent == ("error", {"type": "error", "error": {"type": kind, "message": "x"}})


Ask = Callable[[Scripted], Any]


@pytest.fixture
def play(tiny_model: Path) -> Callable[[Ask], None]:
    def run(story: Ask) -> None:
        async def whole() -> None:
            made = Scripted(tiny_model)
            async with made.open():
                await story(made)
                assert made.admission.active == 0

        asyncio.run(whole())

    return run


def post(made: Scripted, path: str = "/v1/messages", **fields: Any) -> asyncio.Task[httpx.Response]:
    body = {"model": "tiny", "max_tokens": 9, "messages": [USER], **fields}
    return asyncio.create_task(made.http.post(path, json=body))


def test_a_message_is_answered(play: Callable[[Ask], None]) -> None:
    async def story(made: Scripted) -> None:
        task = post(made, stop_sequences=["o"])
        submitted = await made.asked()
        assert submitted.params.max_tokens == 9
        made.send(submitted.id, made.tokens.encode("Hello"), "length", cached=2)
        answer = await task
        body = answer.json()
        assert body["content"] == [{"type": "text", "text": "Hell"}]
        assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "o")
        assert body["usage"]["cache_read_input_tokens"] == 2
        assert body["id"].startswith("msg_") and answer.headers["request-id"] == body["id"]

    play(story)


def test_a_message_is_streamed(play: Callable[[Ask], None]) -> None:
    async def story(made: Scripted) -> None:
        task = post(made, stream=True)
        made.send((await made.asked()).id, [*made.tokens.encode("H\u2028"), 257], cached=2)
        lines = (await task).text.split("\n\n")
        assert lines.pop() == ""
        events = [line.split("\n") for line in lines]
        names = [name.removeprefix("event: ") for name, _ in events]
        datas = [json.loads(data.removeprefix("data: ")) for _, data in events]
        assert names == [data["type"] for data in datas]
        assert names[0] == "message_start" and names[-1] == "message_stop"
        assert datas[0]["message"]["usage"]["cache_read_input_tokens"] == 2
        texts = [d["delta"]["text"] for d in datas if d["type"] == "content_block_delta"]
        assert "".join(texts) == "H\u2028"

    play(story)


def test_tokens_are_counted_as_the_prompt_s_are(play: Callable[[Ask], None]) -> None:
    async def story(made: Scripted) -> None:
        path = "/v1/messages/count_tokens"
        body: Fields = {"model": "tiny", "messages": [USER], "system": "Be brief."}
        counted = (await made.http.post(path, json=body)).json()
        task = post(made, system="Be brief.")
        submitted = await made.asked()
        made.send(submitted.id, [257])
        await task
        assert counted == {"input_tokens": len(submitted.tokens)}
        refused = await post(made, path)  # max_tokens is no field of it
        assert refused.status_code == 400 and refused.json()["type"] == "error"

    play(story)


def test_every_error_has_anthropic_s_form(play: Callable[[Ask], None]) -> None:
    async def story(made: Scripted) -> None:
        async def kind(status: int, answer: Any) -> str:
            response = await answer
            assert response.status_code == status
            body = response.json()
            assert set(body) == {"type", "error"} and body["type"] == "error"
            assert set(body["error"]) == {"type", "message"}
            return str(body["error"]["type"])

        assert await kind(400, post(made, max_tokens=-1)) == "invalid_request_error"
        assert await kind(404, post(made, model="other")) == "not_found_error"
        assert await kind(404, post(made, "/v1/messages/batches")) == "not_found_error"
        assert await kind(405, made.http.get("/v1/messages")) == "invalid_request_error"
        assert await kind(415, made.http.post("/v1/messages", content=b"{}"))
        long = {"role": "user", "content": "x" * 50_000}
        answer = post(made, messages=[long])
        assert await kind(400, answer) == "invalid_request_error"
        assert (await answer).json()["error"]["message"].startswith("prompt is too long: ")
        made.admission.max_sequences = 0
        assert await kind(503, post(made)) == "overloaded_error"

    play(story)
