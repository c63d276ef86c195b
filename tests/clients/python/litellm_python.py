"""LiteLLM, by its provider for vLLM's servers."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import asked
import litellm
from asked import TOOL, user
from pydantic import BaseModel

GIVEN: dict[str, Any] = {
    "model": f"hosted_vllm/{asked.MODEL}",
    "api_base": asked.V1,
    "api_key": asked.KEY,
    "num_retries": 0,
}


class City(BaseModel):
    city: Literal["Paris", "Rome"]


def ask(messages: Any, **more: Any) -> Any:
    messages = user(messages) if isinstance(messages, str) else messages
    return litellm.completion(**{**GIVEN, **more}, messages=messages)


def calls_of(message: Any) -> list[Any]:
    return [[c.function.name, json.loads(c.function.arguments)] for c in message.tool_calls or ()]


def called(prompt: str, **more: Any) -> object:
    choice = ask(prompt, tools=[TOOL], **more).choices[0]
    assert choice.finish_reason == "tool_calls", choice
    return {"calls": calls_of(choice.message), "text": choice.message.content}


def stream() -> object:
    texts, tokens = [], None
    for chunk in ask(asked.TEXT, stream=True, stream_options={"include_usage": True}):
        texts += [each.delta.content for each in chunk.choices if each.delta.content]
        usage = getattr(chunk, "usage", None)
        tokens = usage.completion_tokens if usage else tokens
    return {"text": "".join(texts), "parts": len(texts), "tokens": tokens}


def tools_streamed(prompt: str) -> object:
    chunks = list(ask(prompt, tools=[TOOL], stream=True))
    message: Any = litellm.stream_chunk_builder(chunks).choices[0].message
    return {"calls": calls_of(message), "text": message.content or None}


def history() -> object:
    messages: list[Any] = user(asked.CALL)
    first = ask(messages, tools=[TOOL]).choices[0].message
    (call,) = first.tool_calls
    messages += [first, {"role": "tool", "tool_call_id": call.id, "content": asked.RESULT}]
    second = ask(messages, tools=[TOOL]).choices[0].message
    return {"calls": calls_of(first), "text": second.content}


def schema() -> object:
    return json.loads(ask(asked.FREE, response_format=City).choices[0].message.content)


def json_object() -> object:
    done = ask(asked.OBJECT, response_format={"type": "json_object"})
    return json.loads(done.choices[0].message.content)


def reasoning() -> object:
    message = ask(asked.REASONING, reasoning_effort="low").choices[0].message
    return {"reasoning": message.reasoning_content, "text": message.content}


def responses() -> object:
    done: Any = litellm.responses(**GIVEN, input=asked.TEXT)
    texts = [part.text for item in done.output for part in getattr(item, "content", None) or ()]
    return {"text": "".join(texts)}


def messages() -> object:
    """Anthropic's form, which it makes a chat of."""
    tools: Any = [{"name": "get_weather", "input_schema": asked.PARAMETERS}]
    given: Any = {"messages": user(asked.CALL), "max_tokens": 200, "tools": tools}
    done: Any = asyncio.run(litellm.anthropic_messages(**GIVEN, **given))
    blocks = done["content"] if isinstance(done, dict) else done.content
    blocks = [b if isinstance(b, dict) else b.model_dump() for b in blocks]
    return {"calls": [[b["name"], b["input"]] for b in blocks if b["type"] == "tool_use"]}


NAMED = {"type": "function", "function": {"name": "get_weather"}}
asked.answer(
    {
        "chat": lambda: {"text": ask(asked.TEXT).choices[0].message.content},
        "stream": stream,
        **asked.calls(called, tools_streamed),
        "history": history,
        # It takes `additionalProperties` out of schemas, so weights might add to them without end.
        "required": lambda: called(asked.CALL, tool_choice="required"),
        "named": lambda: called(asked.CALL, tool_choice=NAMED),
        "schema": schema,
        "json_object": json_object,
        "reasoning": reasoning,
        "responses": responses,
        "messages": messages,
        "too_long": lambda: asked.failure(lambda: ask(asked.TOO_LONG)),
        "wrong_key": lambda: asked.failure(lambda: ask(asked.TEXT, api_key="wrong")),
        "full": lambda: asked.failure(lambda: ask(asked.TEXT)),
    }
)
