"""Answers with calls and reasoning as they come over HTTP, from an engine that writes the golden
examples: chats, responses and messages, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from answered import Fields, finish_of, joined, meant, without_ids, written
from scripted import Scripted
from tool_examples import Example, examples
from tool_families import ALL, TOOLS, ids, tokens
from waiting import answer_of

from kvline_contract.launch import ToolCallParser
from kvline_server.http.answering import answering
from kvline_server.ipc.messages import PackedScores, Submit
from kvline_server.ipc.totals import SCORE_BYTES

# Shows tools, and begins or ends reasoning where it is asked to.
TEMPLATE = """{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}{%- for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}{% if add_generation_prompt %}assistant:
{%- if opened %}OPEN{% elif closed %}CLOSE{% endif %}{% endif %}"""
OFFERED: list[Fields] = [
    {"type": "function", "function": {"name": tool.name, "parameters": tool.parameters}}
    for tool in TOOLS
]
CHAT: Fields = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
SCORES = PackedScores(1, 0, bytes(4), bytes(4), bytes(4), b"", b"")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def folder(name: str) -> Path:
        made = tmp_path_factory.mktemp(name)
        tokens(name).tokenizer.save(str(made / "tokenizer.json"))
        thinking = ALL[name].thinking
        marks = (thinking.open, thinking.close) if thinking else ("", "")
        template = TEMPLATE.replace("OPEN", marks[0]).replace("CLOSE", marks[1])
        settings = {"chat_template": template}
        (made / "tokenizer_config.json").write_text(json.dumps(settings))
        return made

    return folder


Server = Callable[[str], Any]


@pytest.fixture
def serving(folders: Callable[[str], Path]) -> Server:
    @asynccontextmanager
    async def serve(name: str) -> AsyncIterator[Scripted]:
        made = Scripted(folders(name), vocabulary=512, parser=ToolCallParser(ALL[name].name))
        async with made.open():
            yield made
            assert made.admission.active == 0
            assert made.admission.totals[SCORE_BYTES] == 0, "what answers held is given back"

    return serve


async def ask(
    made: Scripted,
    body: Fields,
    output: list[list[int]],
    finish: str,
    path: str = "/v1/chat/completions",
    scores: PackedScores | None = None,
) -> tuple[Any, list[Submit]]:
    """The answer, or the data of its events, where each choice has such output; and what the
    engine was asked."""
    task = asyncio.create_task(made.http.post(path, json=body))
    asked = []
    for each in output:  # a prompt's first choice goes before the others
        asked.append(await made.asked())
        made.send(asked[-1].id, each, finish, scores)
    answer = await task
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return answer.json(), asked
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines], asked


def body_of(example: Example, **fields: Any) -> Fields:
    opened = {"chat_template_kwargs": {"opened": True}} if example.in_reasoning else {}
    return CHAT | ({"tools": OFFERED} if example.tools else {}) | opened | fields


def chosen(chunks: list[Fields], index: int = 0) -> list[Fields]:
    found = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
    assert found[0]["delta"] == {"role": "assistant", "content": ""}
    assert all(c["finish_reason"] is None for c in found[:-1])
    return found


def message_of(choices: list[Fields]) -> Fields:
    return without_ids(joined(choice["delta"] for choice in choices))


def case(family: str, name: str) -> Example:
    return next(each for each in examples(family) if each.case == name)


def run(story: Awaitable[None]) -> None:
    async def whole() -> None:
        await story

    asyncio.run(whole())


@pytest.mark.parametrize("name", ["Hermes", "MistralV11", "QwenXML", "Harmony"])
def test_a_chat_has_its_calls_and_reasoning_whole_and_streamed(name: str, serving: Server) -> None:
    async def story() -> None:
        async with serving(name) as made:
            for example in examples(name):
                output, expected = written(example), meant(example.events)
                body = body_of(example)
                answer, _ = await ask(made, body, [output], example.finish)
                [choice] = answer["choices"]
                assert without_ids(choice["message"]) == expected, example.case
                assert choice["finish_reason"] == finish_of(example)
                with_usage = {"stream": True, "stream_options": {"include_usage": True}}
                chunks, _ = await ask(made, body | with_usage, [output], example.finish)
                assert len({chunk["id"] for chunk in chunks}) == 1
                found = chosen(chunks)
                assert message_of(found) == expected, example.case
                assert found[-1]["finish_reason"] == finish_of(example)
                assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == answer["usage"]
                assert answer["usage"]["completion_tokens"] == len(output)
                thought = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
                assert bool(thought) == ("reasoning" in expected)

    run(story())


def test_a_conversation_goes_on_after_a_cut_call(serving: Server) -> None:
    """Its client sends back the message, or the item, that it got."""

    async def story() -> None:
        async with serving("Hermes") as made:
            example = case("Hermes", "B")
            output = written(example)[:16]
            body = body_of(example, parallel_tool_calls=False)
            answer, _ = await ask(made, body, [output], "length")
            [choice] = answer["choices"]
            [call] = choice["message"]["tool_calls"]
            assert choice["finish_reason"] == "length"
            with pytest.raises(ValueError):
                json.loads(call["function"]["arguments"])
            result = {"role": "tool", "tool_call_id": call["id"], "content": "cut"}
            history = [*CHAT["messages"], choice["message"], result]
            await ask(made, body | {"messages": history}, [output], "length")
            tools = [{"type": "function", **tool["function"]} for tool in OFFERED]
            first = {"model": "tiny", "input": "hi", "tools": tools, "parallel_tool_calls": False}
            answer, _ = await ask(made, first, [output], "length", "/v1/responses")
            assert answer["status"] == answer["output"][-1]["status"] == "incomplete"
            result = {"call_id": answer["output"][-1]["call_id"], "output": "cut"}
            items = [*answer["output"], {"type": "function_call_output", **result}]
            again = first | {"input": [{"role": "user", "content": "hi"}, *items]}
            await ask(made, again, [output], "length", "/v1/responses")

    run(story())


def test_choices_are_read_each_by_itself(serving: Server) -> None:
    """O: one with calls, one with text; logprobs have all tokens of each."""

    async def story() -> None:
        async with serving("Hermes") as made:
            called, other = case("Hermes", "B"), case("Hermes", "reasoning")
            outputs = [written(called), written(other)]
            body = body_of(called, n=2, logprobs=True)
            answer, _ = await ask(made, body, outputs, "stop", scores=SCORES)
            chunks, _ = await ask(made, body | {"stream": True}, outputs, "stop", scores=SCORES)
            for index, example in enumerate((called, other)):
                choice, found = answer["choices"][index], chosen(chunks, index)
                assert without_ids(choice["message"]) == meant(example.events)
                assert message_of(found) == meant(example.events)
                ends = choice["finish_reason"], found[-1]["finish_reason"]
                assert ends == (finish_of(example),) * 2
                parts = [c["logprobs"]["content"] for c in found if c["logprobs"]]
                listed = [entry for part in parts for entry in part]
                assert len(choice["logprobs"]["content"]) == len(outputs[index]) == len(listed)

    run(story())


def test_one_call_is_all_where_they_are_not_to_be_parallel(serving: Server) -> None:
    async def story() -> None:
        async with serving("Hermes") as made:
            example = case("Hermes", "B")
            first = meant(example.events)["tool_calls"][:1]
            for streamed in (False, True):
                body = body_of(example, parallel_tool_calls=False, stream=streamed)
                # The engine goes on: it does not know of calls.
                task = asyncio.create_task(ask(made, body, [written(example)[:-1]], None))  # type: ignore[arg-type]
                answer, [asked] = await answer_of(task, 30)
                assert await answer_of(made.aborted.get(), 30) == asked.id
                choices = chosen(answer) if streamed else answer["choices"]
                found = message_of(choices) if streamed else without_ids(choices[0]["message"])
                assert found["tool_calls"] == first
                assert choices[-1]["finish_reason"] == "tool_calls"

    run(story())


def test_an_answer_in_json_that_no_tool_asked_for_is_content(serving: Server) -> None:
    """Q, and tools that the model is shown but may not call."""

    async def story() -> None:
        async with serving("Llama3JSON") as made:
            output = written(case("Llama3JSON", "B"))
            text = case("Llama3JSON", "B").text
            for fields in ({}, {"tools": OFFERED, "tool_choice": "none"}):
                answer, _ = await ask(made, CHAT | fields, [output], "stop")
                [choice] = answer["choices"]
                assert choice["message"] == {"role": "assistant", "content": text}
                assert choice["finish_reason"] == "stop"

    run(story())


def test_a_budget_of_reasoning_goes_to_the_engine(serving: Server) -> None:
    async def story() -> None:
        async with serving("Hermes") as made:
            known, other = ids("Hermes"), case("Hermes", "no call")
            for opened, begin in ((False, known["<think>"]), (True, None)):
                body = CHAT | {"chat_template_kwargs": {"opened": opened}}
                body |= {"thinking_token_budget": 5}
                _, [asked] = await ask(made, body, [written(other)], "stop")
                thinking = asked.params.thinking
                assert thinking is not None
                found = thinking.tokens, thinking.end, thinking.begin
                assert found == (5, known["</think>"], begin)
            body = {**CHAT, "max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 7}}
            _, [asked] = await ask(made, body, [written(other)], "stop", "/v1/messages")
            assert asked.params.thinking is not None and asked.params.thinking.tokens == 7
        async with serving("Hermes-text") as made:  # its marks are no tokens
            answer = await made.http.post(
                "/v1/chat/completions", json=CHAT | {"thinking_token_budget": 5}
            )
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert (error["param"], error["code"]) == ("thinking_token_budget", "unsupported_value")
            output = tokens("Hermes-text").tokenizer.encode("Yes.").ids
            answer, [asked] = await ask(made, body, [output], "stop", "/v1/messages")
            assert answer["stop_reason"] == "end_turn" and asked.params.thinking is None

    run(story())


def test_reasoning_is_left_out_where_it_is_not_asked_for(serving: Server) -> None:
    async def story() -> None:
        async with serving("Hermes") as made:
            example = case("Hermes", "reasoning")
            body = CHAT | {"include_reasoning": False}
            answer, _ = await ask(made, body, [written(example)], "stop")
            chunks, _ = await ask(made, body | {"stream": True}, [written(example)], "stop")
            assert answer["choices"][0]["message"] == {"role": "assistant", "content": "Yes.\n"}
            assert message_of(chosen(chunks))["content"] == "Yes.\n"
            assert not any("reasoning" in c["delta"] for c in chosen(chunks))
            assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0

    run(story())


def test_a_model_whose_calls_no_parser_reads_takes_no_tools(folders: Callable[[str], Path]) -> None:
    async def story() -> None:
        made = Scripted(folders("Hermes"), vocabulary=512)
        assert made.chat is not None
        assert made.chat.answering == answering(TEMPLATE, ids("Hermes"))
        async with made.open():
            answer = await made.http.post("/v1/chat/completions", json=CHAT | {"tools": OFFERED})
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert (error["param"], error["code"]) == ("tools", "unsupported_value")
            assert "no parser here knows" in error["message"]

    run(story())


def response_items(output: list[Fields]) -> Iterator[tuple[str, str]]:
    for item in output:
        if item["type"] == "function_call":
            yield item["name"], item["arguments"]
        else:
            [part] = item["content"]
            yield item["type"], part["text"]


@pytest.mark.parametrize("name", ["Hermes", "MistralV11", "Harmony"])
def test_responses_and_messages_have_items_and_blocks(name: str, serving: Server) -> None:
    tools = [{"name": tool.name, "input_schema": tool.parameters} for tool in TOOLS]
    functions = [
        {"type": "function", "name": tool.name, "parameters": tool.parameters} for tool in TOOLS
    ]
    asked: Fields = {"model": "tiny", "input": "hi", "tools": functions}
    thinking = {"type": "enabled"}
    message: Fields = {**CHAT, "max_tokens": 9, "tools": tools, "thinking": thinking}

    async def story() -> None:
        async with serving(name) as made:
            for each in ("B", "F", "S" if name == "Harmony" else "reasoning, call"):
                example = case(name, each)
                output, expected = [written(example)], meant(example.events)
                called = [tuple(c["function"].values()) for c in expected["tool_calls"]]
                await check_responses(made, asked, output, example, called)
                await check_messages(made, message, output, example, called)

    async def check_responses(
        made: Scripted, body: Fields, output: list[list[int]], example: Example, called: list[Any]
    ) -> None:
        path, finish = "/v1/responses", example.finish
        answer, _ = await ask(made, body, output, finish, path)
        events, _ = await ask(made, body | {"stream": True}, output, finish, path)
        last = events[-1]["response"]
        assert list(response_items(last["output"])) == list(response_items(answer["output"]))
        assert answer["status"] == ("incomplete" if finish == "length" else "completed")
        assert events[-1]["type"] == f"response.{answer['status']}"
        calls = [i for i in answer["output"] if i["type"] == "function_call"]
        assert [(call["name"], call["arguments"]) for call in calls] == called
        parts: dict[int, str] = {}
        for event in events:
            if event["type"].endswith(".delta"):
                at = event["output_index"]
                parts[at] = parts.get(at, "") + event["delta"]
        items = enumerate(response_items(last["output"]))
        assert parts == {at: text for at, (_, text) in items if text}
        thought = answer["usage"]["output_tokens_details"]["reasoning_tokens"]
        assert bool(thought) == (answer["output"][0]["type"] == "reasoning")

    async def check_messages(
        made: Scripted, body: Fields, output: list[list[int]], example: Example, called: list[Any]
    ) -> None:
        path, finish = "/v1/messages", example.finish
        answer, _ = await ask(made, body, output, finish, path)
        events, _ = await ask(made, body | {"stream": True}, output, finish, path)
        uses = [b for b in answer["content"] if b["type"] == "tool_use"]
        whole = [json.loads(a) if finish == "stop" else {} for _, a in called]
        assert [use["input"] for use in uses] == whole
        assert answer["stop_reason"] == ("max_tokens" if finish == "length" else "tool_use")
        ended = next(e for e in events if e["type"] == "message_delta")
        assert ended["delta"]["stop_reason"] == answer["stop_reason"]
        parts = [
            (e["index"], e["delta"]["partial_json"])
            for e in events
            if e["type"] == "content_block_delta" and e["delta"]["type"] == "input_json_delta"
        ]
        at = sorted({index for index, _ in parts})
        texts = ["".join(part for i, part in parts if i == index) for index in at]
        assert texts == [arguments for _, arguments in called]
        kinds = [b["type"] for b in answer["content"]]
        assert ("thinking" in kinds) == ("reasoning" in meant(example.events))
        silent, _ = await ask(made, body | {"thinking": None}, output, finish, path)
        assert [b["type"] for b in silent["content"]] == [k for k in kinds if k != "thinking"]

    run(story())


def test_what_an_answer_keeps_until_its_end_is_bounded(folders: Callable[[str], Path]) -> None:
    """The end of a stream of responses repeats its texts; messages and chats keep none."""

    async def story() -> None:
        made = Scripted(folders("Hermes"), 1 << 15, vocabulary=512, parser=ToolCallParser.HERMES)
        output = made.tokens.encode("Some text. " * 2000)
        body = {"model": "tiny", "input": "hi", "stream": True}
        async with made.open():
            for fields, path, last in (
                (body, "/v1/responses", "response.failed"),
                ({**CHAT, "max_tokens": 9, "stream": True}, "/v1/messages", "message_stop"),
            ):
                events, _ = await ask(made, fields, [output], "stop", path)
                assert events[-1]["type"] == last
            whole = {**body, "stream": False}
            task = asyncio.create_task(made.http.post("/v1/responses", json=whole))
            made.send((await made.asked()).id, output)
            answer = await task
            assert answer.status_code == 400 and "fewer tokens" in answer.text
            short, _ = await ask(made, body, [output[:50]], "stop", "/v1/responses")
            assert short[-1]["type"] == "response.completed"
            assert made.admission.totals[SCORE_BYTES] == 0

    run(story())
