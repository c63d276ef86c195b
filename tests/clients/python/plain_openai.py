"""OpenAI's client for Python against a model that writes what it likes: its plain features, with
what an answer says of itself."""

from __future__ import annotations

import json
from typing import Any, Literal

import asked
import openai
from asked import MODEL, TOOL, user
from pydantic import BaseModel

client = openai.OpenAI(base_url=asked.V1, api_key=asked.KEY, max_retries=0)
create: Any = client.chat.completions.create
PROMPT, WEATHER = "What is the capital of France?", "What is the weather in Paris and in Rome?"
FEW: dict[str, Any] = {"temperature": 0, "max_tokens": 40}
CALL: Any = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'},
}


class City(BaseModel):
    city: Literal["Paris", "Rome"]


def shown(done: Any) -> dict[str, Any]:
    """An answer, and its usage."""
    (choice,), usage = done.choices, done.usage
    calls = choice.message.tool_calls or []
    return {
        "text": choice.message.content or "",
        "calls": [[each.function.name, each.function.arguments] for each in calls],
        "ids": [each.id for each in calls],
        "finish": choice.finish_reason,
        "usage": [usage.prompt_tokens, usage.completion_tokens, usage.total_tokens],
    }


def chat(prompt: str = PROMPT, **more: Any) -> dict[str, Any]:
    return shown(create(model=MODEL, messages=user(prompt), **FEW, **more))


def stream(prompt: str = PROMPT, **more: Any) -> dict[str, Any]:
    """By its deltas: the client's own helper raises where tools are given and the tokens end."""
    given = {"messages": user(prompt), "stream_options": {"include_usage": True}, **FEW, **more}
    texts, calls, ids, finish, usage = [], list[list[str]](), list[str](), None, None
    for chunk in create(model=MODEL, stream=True, **given):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            texts += [choice.delta.content] if choice.delta.content else []
            for part in choice.delta.tool_calls or []:
                if part.index == len(calls):
                    calls.append([part.function.name, ""])
                    ids.append(part.id)
                calls[part.index][1] += part.function.arguments or ""
    assert usage is not None
    return {
        "text": "".join(texts),
        "calls": calls,
        "ids": ids,
        "finish": finish,
        "usage": [usage.prompt_tokens, usage.completion_tokens, usage.total_tokens],
        "parts": len(texts),
    }


def history() -> dict[str, Any]:
    """A call that it made, its result, and its answer."""
    result = {"role": "tool", "tool_call_id": CALL["id"], "content": "sunny, 21 degrees"}
    before = [*user(WEATHER), {"role": "assistant", "content": None, "tool_calls": [CALL]}, result]
    return shown(create(model=MODEL, messages=before, tools=[TOOL], tool_choice="none", **FEW))


def structured() -> dict[str, Any]:
    parse = client.chat.completions.parse
    done = parse(model=MODEL, messages=user(WEATHER), response_format=City, **FEW)
    found = done.choices[0].message.parsed
    assert found is not None, done
    return {**shown(done), "parsed": found.model_dump()}


def flat(response: Any) -> dict[str, Any]:
    usage = response.usage
    calls = [item for item in response.output if item.type == "function_call"]
    return {
        "text": response.output_text,
        "calls": [[each.name, each.arguments] for each in calls],
        "ids": [each.call_id for each in calls],
        "finish": response.status,
        "usage": [usage.input_tokens, usage.output_tokens, usage.total_tokens],
    }


def responses(prompt: str = PROMPT, **more: Any) -> dict[str, Any]:
    create = client.responses.create
    return flat(create(model=MODEL, input=prompt, temperature=0, max_output_tokens=40, **more))


def responses_stream() -> dict[str, Any]:
    with client.responses.stream(
        model=MODEL, input=PROMPT, temperature=0, max_output_tokens=40
    ) as events:
        parts = sum(event.type == "response.output_text.delta" for event in events)
        return {**flat(events.get_final_response()), "parts": parts}


def responses_structured() -> dict[str, Any]:
    given: Any = {"temperature": 0, "max_output_tokens": 40}
    done = client.responses.parse(model=MODEL, input=WEATHER, text_format=City, **given)
    assert done.output_parsed is not None, done
    return {**flat(done), "parsed": done.output_parsed.model_dump()}


FLAT: Any = {"type": "function", "strict": True, **asked.FUNCTION}
ONE: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
# Behind a call of one tool there may stand another: a grammar of both.
CLOCK = {"name": "get_time", "parameters": asked.PARAMETERS}
BOTH: dict[str, Any] = {
    "tools": [TOOL, {"type": "function", "function": CLOCK}],
    "tool_choice": "required",
}
asked.answer(
    {
        "chat": chat,
        "stream": stream,
        "tools": lambda: chat(WEATHER, tools=[TOOL]),
        "tools_stream": lambda: stream(WEATHER, tools=[TOOL]),
        "strict_tools": lambda: chat(
            WEATHER, tools=[{"type": "function", "function": {**asked.FUNCTION, "strict": True}}]
        ),
        "required": lambda: chat(WEATHER, **ONE),
        "required_stream": lambda: stream(WEATHER, **ONE),
        "parallel": lambda: chat(WEATHER, **BOTH),
        "history": history,
        "structured": structured,
        "responses": responses,
        "responses_stream": responses_stream,
        "responses_tools": lambda: responses(WEATHER, tools=[FLAT]),
        "responses_required": lambda: responses(WEATHER, tools=[FLAT], tool_choice="required"),
        "responses_structured": responses_structured,
        "json_object": lambda: {
            **(found := chat("As JSON.", response_format={"type": "json_object"})),
            "starts": found["text"].lstrip()[:1],
            "is_whole": found["finish"] != "stop" or isinstance(json.loads(found["text"]), dict),
        },
    }
)
