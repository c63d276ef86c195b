"""OpenAI's client for Python."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Literal

import asked
import openai
from asked import MODEL, TOOL, user
from pydantic import BaseModel

client = openai.OpenAI(base_url=asked.V1, api_key=asked.KEY, max_retries=0)
create: Any = client.chat.completions.create


class City(BaseModel):
    city: Literal["Paris", "Rome"]


def chat() -> object:
    return {"text": create(model=MODEL, messages=user(asked.TEXT)).choices[0].message.content}


def stream() -> object:
    texts, tokens = [], None
    options = {"include_usage": True}
    for chunk in create(
        model=MODEL, messages=user(asked.TEXT), stream=True, stream_options=options
    ):
        texts += [each.delta.content for each in chunk.choices if each.delta.content]
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
    return {"text": "".join(texts), "parts": len(texts), "tokens": tokens}


def calls_of(message: Any) -> list[Any]:
    return [[c.function.name, json.loads(c.function.arguments)] for c in message.tool_calls or ()]


def called(prompt: str, **more: Any) -> dict[str, Any]:
    """Of a chat that ends with calls."""
    choice = create(model=MODEL, messages=user(prompt), tools=[TOOL], **more).choices[0]
    assert choice.finish_reason == "tool_calls", choice
    ids = [each.id for each in choice.message.tool_calls]
    assert len(set(ids)) == len(ids), ids
    return {"calls": calls_of(choice.message), "text": choice.message.content}


def one(choice: Any) -> dict[str, Any]:
    """Of a call that is required, without others beside it."""
    found = called(asked.FREE, tool_choice=choice, parallel_tool_calls=False)
    assert len(found["calls"]) == 1, found
    return found


def tools_streamed(prompt: str) -> object:
    """By the client's own helper, which joins the deltas."""
    with client.chat.completions.stream(model=MODEL, messages=user(prompt), tools=[TOOL]) as events:
        done = [e for e in events if e.type == "tool_calls.function.arguments.done"]
        choice = events.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls", choice
    assert len(done) == len(choice.message.tool_calls or ()), done
    return {"calls": calls_of(choice.message), "text": choice.message.content or None}


def history() -> object:
    """A call, its result, and the answer."""
    messages: list[Any] = user(asked.CALL)
    first = create(model=MODEL, messages=messages, tools=[TOOL]).choices[0].message
    (call,) = first.tool_calls
    messages += [first, {"role": "tool", "tool_call_id": call.id, "content": asked.RESULT}]
    second = create(model=MODEL, messages=messages, tools=[TOOL]).choices[0]
    assert second.finish_reason == "stop", second
    return {"calls": calls_of(first), "text": second.message.content}


def schema() -> object:
    done = client.chat.completions.parse(
        model=MODEL, messages=user(asked.FREE), response_format=City
    )
    found = done.choices[0].message.parsed
    assert found is not None, done
    return found.model_dump()


def json_object() -> object:
    kind = {"type": "json_object"}
    done = create(model=MODEL, messages=user(asked.OBJECT), response_format=kind)
    return json.loads(done.choices[0].message.content)


def forbidden() -> object:
    """An output that the grammar of JSON does not allow."""
    kind = {"type": "json_object"}
    given: dict[str, Any] = {"messages": user(asked.TEXT), "response_format": kind}
    return asked.failure(lambda: create(model=MODEL, **given))


def structured_outputs() -> object:
    """vLLM's own field, which the client sends as an extra."""
    extra = {"structured_outputs": {"choice": asked.CITIES}}
    done = create(model=MODEL, messages=user(asked.FREE), extra_body=extra)
    return {"city": done.choices[0].message.content}


def reasoning() -> object:
    done = create(model=MODEL, messages=user(asked.REASONING), reasoning_effort="low")
    message = done.choices[0].message
    assert done.usage.completion_tokens_details.reasoning_tokens > 0, done.usage
    return {"reasoning": message.reasoning, "text": message.content}


def responses() -> object:
    return {"text": client.responses.create(model=MODEL, input=asked.TEXT).output_text}


def responses_stream() -> object:
    texts, tokens, kinds = [], None, []
    for event in client.responses.create(model=MODEL, input=asked.TEXT, stream=True):
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            texts.append(event.delta)
        if event.type == "response.completed":
            tokens = event.response.usage and event.response.usage.output_tokens
    assert [kinds[0], kinds[-1]] == ["response.created", "response.completed"], kinds
    return {"text": "".join(texts), "parts": len(texts), "tokens": tokens}


def flat(items: Iterable[Any]) -> list[Any]:
    return [[i.name, json.loads(i.arguments)] for i in items if i.type == "function_call"]


def responses_tools() -> object:
    """A call, its result, and the answer; nothing is kept by the server in between."""
    tools: Any = [{"type": "function", "strict": True, **asked.FUNCTION}]
    given: list[Any] = user(asked.CALL)
    first = client.responses.create(model=MODEL, input=given, tools=tools)
    (call,) = [item for item in first.output if item.type == "function_call"]
    result = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": asked.RESULT,
    }
    given += [*first.output, result]
    second = client.responses.create(model=MODEL, input=given, tools=tools)
    return {"calls": flat(first.output), "text": second.output_text}


def responses_tools_stream() -> object:
    tools: Any = [{"type": "function", **asked.FUNCTION}]
    with client.responses.stream(model=MODEL, input=asked.CALLS, tools=tools) as events:
        written = [e.arguments for e in events if e.type == "response.function_call_arguments.done"]
        last = events.get_final_response()
    found = flat(last.output)
    assert [json.loads(each) for each in written] == [given for _, given in found], written
    return {"calls": found, "text": last.output_text}


def responses_schema() -> object:
    done = client.responses.parse(model=MODEL, input=asked.FREE, text_format=City)
    assert done.output_parsed is not None, done
    return done.output_parsed.model_dump()


def with_key(key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=asked.V1, api_key=key, max_retries=0)


def models() -> object:
    return [each.id for each in client.models.list()]


NAMED = {"type": "function", "function": {"name": "get_weather"}}
asked.answer(
    {
        "chat": chat,
        "stream": stream,
        **asked.calls(called, tools_streamed),
        "history": history,
        "required": lambda: one("required"),
        "named": lambda: one(NAMED),
        "schema": schema,
        "json_object": json_object,
        "forbidden": forbidden,
        "structured_outputs": structured_outputs,
        "reasoning": reasoning,
        "responses": responses,
        "responses_stream": responses_stream,
        "responses_tools": responses_tools,
        "responses_tools_stream": responses_tools_stream,
        "responses_schema": responses_schema,
        "too_long": lambda: asked.failure(
            lambda: create(model=MODEL, messages=user(asked.TOO_LONG))
        ),
        "wrong_key": lambda: asked.failure(with_key("wrong").models.list),
        "full": lambda: asked.failure(lambda: create(model=MODEL, messages=user(asked.TEXT))),
        "models": models,
    }
)
