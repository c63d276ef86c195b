"""/v1/responses: what its input means as a chat, and its answers as OpenAI's client reads them."""

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
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from scripted import Scripted
from waiting import limit

from kvline_server.formats.events import (
    CallArguments,
    CallEnd,
    CallStart,
    Event,
    Reasoning,
    Text,
)
from kvline_server.http.body import MAX_VALUES
from kvline_server.http.conversation import rendered
from kvline_server.http.errors import BadRequest, TooMany
from kvline_server.http.fields import named
from kvline_server.http.generate import RequestLimits
from kvline_server.http.later import encode
from kvline_server.http.pieces import Piece
from kvline_server.http.protocol.chat import ChatRequest
from kvline_server.http.protocol.responses import ResponsesRequest
from kvline_server.http.protocol.strict import parse
from kvline_server.http.responses import Responses
from kvline_server.http.responses_request import to_chat
from kvline_server.http.translated import Used
from kvline_server.ipc.messages import PackedScores

Fields = dict[str, Any]
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOOL: Fields = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
CALL: Fields = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
DEEP: Any = json.loads("[" * 64 + "]" * 64)
RESULT: Fields = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}


def asked(**fields: Any) -> ChatRequest:
    return to_chat(parse(ResponsesRequest, {"model": "tiny", "input": "hi", **fields}))[0]


def messages(**fields: Any) -> list[Fields]:
    dumped = [m.model_dump(exclude_none=True) for m in asked(**fields).messages]
    for message in dumped:
        for call in message.get("tool_calls", ()):
            call["function"].pop("parsed_arguments", None)
    return dumped


def test_an_input_is_a_conversation() -> None:
    assert messages() == [{"role": "user", "content": "hi"}]
    assert messages(instructions="Be brief.", input=[
        {"role": "developer", "content": "In English."},
        {"type": "message", "role": "user", "content": [
            {"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"role": "system", "content": "Later."},
    ]) == [
        {"role": "system", "content": "Be brief.\n\nIn English."},
        {"role": "user", "content": "ab"},
        {"role": "system", "content": "Later."},
    ]  # fmt: skip


def test_what_an_answer_was_made_of_is_one_message() -> None:
    """Items of an answer come back as they were sent, with ids and all."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    text = {"type": "output_text", "text": "Wait.", "annotations": [], "logprobs": []}
    thought: Fields = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None}
    items = [
        {"role": "user", "content": "a"},
        {**thought, "content": [{"type": "reasoning_text", "text": "hm"}], "status": None},
        {
            "id": "m",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [text],
        },
        {**CALL, "id": "fc_1", "status": "completed"},
        {**CALL, "call_id": "c2", "namespace": "crm"},
        RESULT,
        {**RESULT, "call_id": "c2", "output": [{"type": "input_text", "text": "none"}]},
        {"role": "assistant", "content": "Sunny."},
        {**thought, "summary": [{"type": "summary_text", "text": "so"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]
    other = {**call, "id": "c2", "function": {"name": "crm.f", "arguments": "{}"}}
    assert messages(input=items) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "Wait.", "reasoning": "hm", "tool_calls": [call, other]},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
        {"role": "tool", "content": "none", "tool_call_id": "c2"},
        {"role": "assistant", "content": "Sunny."},
        {"role": "assistant", "content": "No.", "reasoning": "so"},
    ]


def test_settings_are_those_of_a_chat() -> None:
    made = asked(
        max_output_tokens=5, temperature=0, top_p=0.5, stream=True, tools=[TOOL], store=True,
        tool_choice={"type": "function", "name": "f"}, parallel_tool_calls=False,
        reasoning={"effort": "low", "summary": "auto"}, top_logprobs=2,
        text={"format": {"type": "json_schema", "name": "n", "schema": {}, "strict": True},
              "verbosity": "medium"},
        include=["reasoning.encrypted_content", "message.output_text.logprobs"],
        client_metadata={"a": "b"}, prompt_cache_key="k", truncation="disabled", background=False,
    )  # fmt: skip
    assert (made.most(), made.temperature, made.top_p, made.stream) == (5, 0, 0.5, True)
    assert made.reasoning_effort == "low" and made.parallel_tool_calls is False
    assert made.logprobs and made.top_logprobs == 2
    assert asked(top_logprobs=2).logprobs and not asked(top_logprobs=0).logprobs
    assert made.tool_choice is not None and not isinstance(made.tool_choice, str)
    assert made.tool_choice.function.name == "f"
    assert made.response_format is not None and made.response_format.json_schema is not None
    assert made.response_format.json_schema.strict
    assert [t.function.name for t in made.tools or ()] == ["f"]


def test_tools_of_a_namespace_come_back_with_it() -> None:
    """As Codex offers those of MCP servers; what the model may do without is left out."""
    crm = {"type": "namespace", "name": "crm", "description": "d", "tools": [TOOL]}
    fields = {"tools": [TOOL, crm, {**crm, "name": "mcp__x__"}, {"type": "web_search", "a": 1}]}
    request = parse(ResponsesRequest, {"model": "tiny", "input": "hi", **fields})
    made, names, _ = to_chat(request)
    assert [t.function.name for t in made.tools or ()] == ["f", "crm.f", "mcp__x__f"]
    assert names == {"crm.f": ("crm", "f"), "mcp__x__f": ("mcp__x__", "f")}


WRONG: list[tuple[Fields, str, str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_value"),
    ({"conversation": {"id": "a"}}, "conversation", "unsupported_value"),
    ({"prompt": {"id": "a"}}, "prompt", "unsupported_value"),
    ({"background": True}, "background", "unsupported_value"),
    ({"truncation": "auto"}, "truncation", "unsupported_value"),
    ({"include": ["everything"]}, "include[0]", "invalid_value"),
    ({"max_tokens": 5}, "max_tokens", "unknown_parameter"),
    ({"input": []}, "input", "empty_array"),
    ({"input": None}, "input", "missing_required_parameter"),
    ({"input": [5]}, "input[0]", "invalid_type"),
    ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type", "unsupported_value"),
    ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role", "invalid_value"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "input[0].content[0].image_url",
        "missing_required_parameter",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
        "input[0].content[0].file_id",
        "unsupported_value",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
        "input[0].content[0].type",
        "unsupported_value",
    ),
    (
        {"input": [{"role": "system", "content": [{"type": "input_image", "image_url": "data:"}]}]},
        "input[0].content[0].type",
        "unsupported_value",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
        "input[0].content[0].text",
        "missing_required_parameter",
    ),
    (
        {"input": [{"role": "assistant", "content": [{"type": "refusal", "text": "a"}]}]},
        "input[0].content[0].refusal",
        "missing_required_parameter",
    ),
    (
        {"input": [{"role": "user", "content": [{"text": "a"}]}]},
        "input[0].content[0].type",
        "missing_required_parameter",
    ),
    ({"input": [{"type": "function_call"}]}, "input[0].call_id", "missing_required_parameter"),
    ({"tools": [{"type": "custom", "name": "a"}]}, "tools[0].type", "unsupported_value"),
    ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name", "invalid_value"),
    ({"tools": [5]}, "tools[0]", "invalid_type"),
    ({"tools": [{"type": "web_search", "a": DEEP}]}, "tools[0]", "invalid_value"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type", "invalid_value"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "invalid_value"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort", "invalid_value"),
    # What only the chat finds in a message, by the item that began it.
    (
        {"instructions": "a", "input": [{"role": "user", "content": "b"}, *[CALL] * 129]},
        "input[1]",
        "array_above_max_length",
    ),
]


@pytest.mark.parametrize(("fields", "param", "code"), WRONG, ids=lambda value: str(value)[:40])
def test_what_is_wrong_is_named(fields: Fields, param: str, code: str) -> None:
    with pytest.raises(BadRequest) as refused:
        asked(**fields)
    assert (refused.value.param, refused.value.code) == (param, code)
    assert refused.value.message.startswith(f"{param}: ")


def test_a_call_whose_arguments_have_too_many_values_is_named() -> None:
    large = {**CALL, "arguments": '{"a": [' + "[]," * MAX_VALUES + "1]}"}
    given = [{"role": "user", "content": "a"}, CALL, {**RESULT}, CALL, large]
    chat, _, fields = to_chat(parse(ResponsesRequest, {"model": "tiny", "input": given}))
    with pytest.raises(BadRequest) as refused, named(fields.of):
        rendered(chat.messages)
    assert refused.value.param == "input[4]"
    assert refused.value.message.startswith("input[4]: the arguments of all calls")


ANSWER: list[Event] = [
    Reasoning("h"),
    Reasoning("m"),
    Text("Wai"),
    Text("t."),
    CallStart(0, "f"),
    CallArguments(0, '{"a"'),
    CallArguments(0, ": 1}"),
    CallEnd(0, True),
    CallStart(1, "crm.f"),
    CallArguments(1, "{}"),
    CallEnd(1, True),
    Text("So."),
]


def work_of(request: ChatRequest) -> Any:
    limits, ids = RequestLimits("tiny", 307, 256, 20, 256), itertools.count()
    return SimpleNamespace(
        id="resp_x", request=request, created=1, limits=limits, call_id=lambda: f"call_{next(ids)}"
    )


def played(events: list[Event], finish: str, **fields: Any) -> tuple[list[Any], Response]:
    """The events of a stream as OpenAI's client reads them, and the whole answer."""
    crm = {"type": "namespace", "name": "crm", "description": "d", "tools": [TOOL]}
    made = Responses()
    chat = made.read({"model": "tiny", "input": "hi", "tools": [TOOL, crm], **fields})
    sent = list(made.begin(work_of(chat)))
    for index, event in enumerate(events):
        piece = Piece(finish=finish if index == len(events) - 1 else None)
        piece.write(event)
        sent += made.write(piece, Used(5, 4, 2))
    sent += made.end(Used(5, 4, 9, 2))
    assert [name for name, _ in sent] == [data["type"] for _, data in sent]
    assert [data["sequence_number"] for _, data in sent] == list(range(len(sent)))
    whole = json.loads(b"".join(encode(made.answer())))
    return [EVENT.validate_json(msgspec.json.encode(data)) for _, data in sent], Response(**whole)


PART = ["response.output_item.added", "response.content_part.added"]
DONE = ["response.content_part.done", "response.output_item.done"]
CALLED = ["response.output_item.added", "response.function_call_arguments.delta"]
ENDED = ["response.function_call_arguments.done", "response.output_item.done"]


def test_events_come_in_openai_s_order() -> None:
    events, whole = played(ANSWER, "stop")
    assert [event.type for event in events] == [
        *("response.created", "response.in_progress"),
        *(*PART, *["response.reasoning_text.delta"] * 2, "response.reasoning_text.done", *DONE),
        *(*PART, *["response.output_text.delta"] * 2, "response.output_text.done", *DONE),
        *(*CALLED, "response.function_call_arguments.delta", *ENDED),
        *(*CALLED, *ENDED),
        *(*PART, "response.output_text.delta", "response.output_text.done", *DONE),
        "response.completed",
    ]
    dones = [event.item for event in events if event.type == "response.output_item.done"]
    added = [event.item.id for event in events if event.type == "response.output_item.added"]
    assert added == [item.id for item in dones] and len(set(added)) == 5
    output: list[Any] = list(whole.output)
    assert dones == output == events[-1].response.output
    thought, text, call, other, rest = output
    assert (thought.type, text.type, rest.type) == ("reasoning", "message", "message")
    assert thought.content is not None and thought.content[0].text == "hm"
    assert call.type == other.type == "function_call"
    assert (call.name, call.arguments, call.namespace) == ("f", '{"a": 1}', None)
    assert (other.name, other.arguments, other.namespace) == ("f", "{}", "crm")
    assert call.call_id != other.call_id
    ends = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert [(e.name, e.arguments) for e in ends] == [("f", '{"a": 1}'), ("f", "{}")]
    assert whole.output_text == "Wait.So." and whole.status == "completed"
    used = whole.usage
    assert used is not None
    assert (used.input_tokens, used.output_tokens, used.total_tokens) == (5, 9, 14)
    assert used.input_tokens_details.cached_tokens == 4
    assert used.output_tokens_details.reasoning_tokens == 2


def test_a_cut_answer_is_incomplete() -> None:
    cut: list[Event] = [Text("a"), CallStart(0, "f"), CallArguments(0, '{"a')]
    events, whole = played(cut, "length", max_output_tokens=3)
    assert events[-1].type == "response.incomplete" and whole.status == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    call = whole.output[1]
    assert call.type == "function_call" and (call.arguments, call.status) == ('{"a', "incomplete")
    output: list[Any] = list(whole.output)
    assert [item.status for item in output] == ["completed", "incomplete"]


def test_a_call_whose_arguments_are_no_object_is_incomplete() -> None:
    events: list[Event] = [CallStart(0, "f"), CallArguments(0, "{"), CallEnd(0, False), Text("a")]
    _, whole = played(events, "stop")
    output: list[Any] = list(whole.output)
    assert [item.status for item in output] == ["incomplete", "completed"]


def test_the_answer_repeats_what_was_asked() -> None:
    _, whole = played([Text("a")], "stop", instructions="Be brief.", temperature=0.5,
                      store=True, metadata={"a": "b"}, max_output_tokens=9, tool_choice="none",
                      reasoning={"effort": "low"})  # fmt: skip
    assert whole.store is False and whole.previous_response_id is None  # type: ignore[attr-defined]
    assert (whole.instructions, whole.temperature, whole.top_p) == ("Be brief.", 0.5, 1.0)
    assert (whole.metadata, whole.max_output_tokens, whole.tool_choice) == ({"a": "b"}, 9, "none")
    assert [tool.type for tool in whole.tools] == ["function", "namespace"]
    assert whole.reasoning is not None and whole.reasoning.effort == "low"


@pytest.mark.parametrize(
    ("error", "code"), [(TooMany("x"), "rate_limit_exceeded"), (BadRequest("x"), "server_error")]
)
def test_an_error_is_the_last_event(error: Any, code: str) -> None:
    made = Responses()
    chat = made.read({"model": "tiny", "input": "hi", "stream": True})
    begun = list(made.begin(work_of(chat)))
    [(name, data)] = made.fail(error)
    event = EVENT.validate_json(msgspec.json.encode(data))
    assert name == event.type == "response.failed" and event.sequence_number == len(begun)
    assert (event.response.error.code, event.response.status) == (code, "failed")


Story = Callable[[Scripted, openai.AsyncOpenAI], Any]


@pytest.fixture
def play(tiny_model: Path) -> Callable[[Story], None]:
    """OpenAI's own client, and an engine that answers at command."""

    def run(story: Story) -> None:
        async def whole() -> None:
            made = Scripted(tiny_model)
            transport = httpx.ASGITransport(made.app)
            async with (
                made.open(),
                httpx.AsyncClient(transport=transport, timeout=limit(60)) as http,
            ):
                any: Any = http  # the client names its own copy of httpx
                client = openai.AsyncOpenAI(
                    base_url="http://tiny/v1",
                    api_key="none",
                    http_client=any,
                    max_retries=0,
                )
                await story(made, client)
                assert made.admission.active == 0

        asyncio.run(whole())

    return run


def test_the_openai_client_has_an_answer(play: Callable[[Story], None]) -> None:
    async def story(made: Scripted, client: openai.AsyncOpenAI) -> None:
        task = asyncio.create_task(client.responses.create(model="tiny", input="hi"))
        submitted = await made.asked()
        assert made.tokens.decode(submitted.tokens).startswith("<|start|>user\nhi<|end|>")
        made.send(submitted.id, made.tokens.encode("Hello"), "length", cached=4)
        answer = await task
        assert answer.id.startswith("resp_") and answer.output_text == "Hello"
        assert answer.status == "incomplete" and answer.usage is not None
        assert answer.usage.input_tokens_details.cached_tokens == 4
        assert answer.usage.output_tokens == 5

    play(story)


def test_the_openai_client_streams(play: Callable[[Story], None]) -> None:
    async def story(made: Scripted, client: openai.AsyncOpenAI) -> None:
        async def read() -> Response:
            async with client.responses.stream(model="tiny", input="hi") as stream:
                deltas = [e.delta async for e in stream if e.type == "response.output_text.delta"]
                final = await stream.get_final_response()
            assert "".join(deltas) == final.output_text
            return final

        task = asyncio.create_task(read())
        made.send((await made.asked()).id, [*made.tokens.encode("Hé"), 257])
        answer = await task
        assert (answer.output_text, answer.status) == ("Hé", "completed")

    play(story)


SCORES = PackedScores(1, 2, bytes(4), bytes(4), bytes(4), bytes(8), bytes(8))


@pytest.mark.parametrize("streamed", [False, True])
def test_logprobs_have_the_form_of_responses(play: Callable[[Story], None], streamed: bool) -> None:
    async def story(made: Scripted, client: openai.AsyncOpenAI) -> None:
        async def read() -> list[Any]:
            asked: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
            if not streamed:
                answer = await client.responses.create(model="tiny", input="hi", **asked)
                [item] = answer.output
                assert item.type == "message" and item.content[0].type == "output_text"
                return item.content[0].logprobs or []
            stream = await client.responses.create(model="tiny", input="hi", stream=True, **asked)
            return [
                entry
                async for event in stream
                if event.type == "response.output_text.delta"
                for entry in event.logprobs
            ]

        task = asyncio.create_task(read())
        ids = [*made.tokens.encode("Hé"), 257]  # parts of a character and the end have no text
        made.send((await made.asked()).id, ids, "stop", SCORES)
        found = await task
        assert [len(entry.top_logprobs) for entry in found] == [2] * len(ids)
        assert all(entry.logprob == 0 for entry in found)

    play(story)


def test_an_error_has_openai_s_form(play: Callable[[Story], None]) -> None:
    async def story(made: Scripted, client: openai.AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="tiny", input="hi", previous_response_id="resp_1")
        assert refused.value.param == "previous_response_id"
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="other", input="hi")

    play(story)
