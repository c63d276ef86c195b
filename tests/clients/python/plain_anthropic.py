"""Anthropic's client for Python against a model that writes what it likes: its plain features, with
what an answer says of itself."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import asked
from asked import MODEL, user

client = anthropic.Anthropic(base_url=asked.URL, api_key=asked.KEY, max_retries=0)
PROMPT, WEATHER = "What is the capital of France?", "What is the weather in Paris and in Rome?"
TOOL: Any = {"name": "get_weather", "description": "of a city", "input_schema": asked.PARAMETERS}
FEW: dict[str, Any] = {"model": MODEL, "max_tokens": 40, "extra_body": {"temperature": 0}}


def shown(message: Any) -> dict[str, Any]:
    """An answer, and its usage, which has no total."""
    calls = [block for block in message.content if block.type == "tool_use"]
    usage = message.usage
    given = usage.input_tokens + (usage.cache_read_input_tokens or 0)
    return {
        "text": "".join(block.text for block in message.content if block.type == "text"),
        "calls": [[each.name, json.dumps(each.input)] for each in calls],
        "ids": [each.id for each in calls],
        "finish": message.stop_reason,
        "usage": [given, usage.output_tokens, given + usage.output_tokens],
    }


def messages(prompt: str = PROMPT, **more: Any) -> dict[str, Any]:
    return shown(client.messages.create(messages=user(prompt), **FEW, **more))


def stream(prompt: str = PROMPT, **more: Any) -> dict[str, Any]:
    """By the client's own helper, which joins the deltas."""
    with client.messages.stream(messages=user(prompt), **FEW, **more) as events:
        parts = sum(event.type == "text" for event in events)
        return {**shown(events.get_final_message()), "parts": parts}


def history() -> dict[str, Any]:
    """A call that it made, its result, and its answer."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny, 21 degrees"}
    given: Any = [
        *user(WEATHER),
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    none: Any = {"type": "none"}
    return shown(client.messages.create(messages=given, tools=[TOOL], tool_choice=none, **FEW))


def counted() -> dict[str, Any]:
    """As many tokens as the prompt of the same chat has."""
    tokens = client.messages.count_tokens(model=MODEL, messages=user(PROMPT)).input_tokens
    return {**messages(), "counted": tokens}


ANY: Any = {"type": "any", "disable_parallel_tool_use": True}
asked.answer(
    {
        "messages": messages,
        "messages_stream": stream,
        "messages_tools": lambda: messages(WEATHER, tools=[TOOL]),
        "messages_tools_stream": lambda: stream(WEATHER, tools=[TOOL]),
        "messages_required": lambda: messages(WEATHER, tools=[TOOL], tool_choice=ANY),
        "messages_required_stream": lambda: stream(WEATHER, tools=[TOOL], tool_choice=ANY),
        "messages_history": history,
        "count_tokens": counted,
    }
)
