"""Anthropic's client for Python."""

from __future__ import annotations

from typing import Any

import anthropic
import asked
from asked import MODEL, user

client = anthropic.Anthropic(base_url=asked.URL, api_key=asked.KEY, max_retries=0)
TOOL: Any = {
    "name": "get_weather",
    "description": "of a city",
    "input_schema": asked.PARAMETERS,
}


def create(prompt: Any, **more: Any) -> Any:
    messages = user(prompt) if isinstance(prompt, str) else prompt
    return client.messages.create(model=MODEL, max_tokens=200, messages=messages, **more)


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def calls_of(message: Any) -> list[Any]:
    return [[block.name, block.input] for block in message.content if block.type == "tool_use"]


def chat() -> object:
    return {"text": text_of(create(asked.TEXT, system="Be short."))}


def stream() -> object:
    with client.messages.stream(
        model=MODEL,
        max_tokens=200,
        messages=user(asked.TEXT),
    ) as events:
        texts = list(events.text_stream)
        usage = events.get_final_message().usage
    return {"text": "".join(texts), "parts": len(texts), "tokens": usage.output_tokens}


def called(prompt: str, **more: Any) -> object:
    message = create(prompt, tools=[TOOL], **more)
    assert message.stop_reason == "tool_use", message
    return {"calls": calls_of(message), "text": text_of(message) or None}


def tools_streamed(prompt: str) -> object:
    """By the client's own helper, which joins the deltas."""
    given: Any = {"messages": user(prompt), "tools": [TOOL]}
    with client.messages.stream(model=MODEL, max_tokens=200, **given) as events:
        message = events.get_final_message()
    assert message.stop_reason == "tool_use", message
    return {"calls": calls_of(message), "text": text_of(message) or None}


def history() -> object:
    """A call, its result, and the answer."""
    messages: list[Any] = user(asked.CALL)
    first = create(messages, tools=[TOOL])
    (call,) = [block for block in first.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": asked.RESULT}
    messages += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = create(messages, tools=[TOOL])
    assert second.stop_reason == "end_turn", second
    return {"calls": calls_of(first), "text": text_of(second)}


def reasoning() -> object:
    message = create(asked.REASONING, thinking={"type": "adaptive"})
    thought = [block.thinking for block in message.content if block.type == "thinking"]
    return {"reasoning": "".join(thought), "text": text_of(message)}


def count_tokens() -> object:
    """As many as the prompt of the same chat has."""
    counted = client.messages.count_tokens(model=MODEL, messages=user(asked.TEXT))
    usage = create(asked.TEXT).usage
    spent = usage.input_tokens + (usage.cache_read_input_tokens or 0)
    return {"counted": counted.input_tokens, "spent": spent}


def wrong_key() -> object:
    other = anthropic.Anthropic(base_url=asked.URL, api_key="wrong", max_retries=0)
    given: Any = {"messages": user(asked.TEXT)}
    return asked.failure(lambda: other.messages.create(model=MODEL, max_tokens=8, **given))


FORCED = {"type": "any", "disable_parallel_tool_use": True}
NAMED = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
asked.answer(
    {
        "chat": chat,
        "stream": stream,
        **asked.calls(called, tools_streamed),
        "history": history,
        "required": lambda: called(asked.FREE, tool_choice=FORCED),
        "named": lambda: called(asked.FREE, tool_choice=NAMED),
        "reasoning": reasoning,
        "count_tokens": count_tokens,
        "too_long": lambda: asked.failure(lambda: create(asked.TOO_LONG)),
        "wrong_key": wrong_key,
        "full": lambda: asked.failure(lambda: create(asked.TEXT)),
        "models": lambda: [each.id for each in client.models.list()],
    }
)
