"""OpenAI's Agents SDK for Python, with both of its model classes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import asked
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
CHAT, RESPONSES = OpenAIChatCompletionsModel, OpenAIResponsesModel
loop = asyncio.Runner()
calls: list[Any] = []  # that the agent under way has had


class City(BaseModel):
    city: Literal["Paris", "Rome"]


@function_tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Of a city."""
    calls.append(["get_weather", {"city": city}])
    return asked.RESULT


def agent(kind: Any, key: str = asked.KEY, **more: Any) -> Agent[Any]:
    client = AsyncOpenAI(base_url=asked.V1, api_key=key, max_retries=0)
    return Agent(name="one", model=kind(model=asked.MODEL, openai_client=client), **more)


async def run(of: Agent[Any], prompt: str) -> Any:
    return (await Runner.run(of, prompt)).final_output


async def text(kind: Any) -> object:
    return {"text": await run(agent(kind, instructions="Be short."), asked.TEXT)}


async def streamed(of: Agent[Any], prompt: str) -> tuple[list[str], Any]:
    """Parts of text, and the run."""
    result = Runner.run_streamed(of, prompt)
    texts: list[str] = []
    async for event in result.stream_events():
        data: Any = event.data if event.type == "raw_response_event" else None
        if data is not None and data.type == "response.output_text.delta":
            texts.append(data.delta)
    return texts, result


async def stream(kind: Any) -> object:
    settings = ModelSettings(include_usage=True)
    texts, result = await streamed(agent(kind, model_settings=settings), asked.TEXT)
    tokens = result.context_wrapper.usage.output_tokens
    return {"text": "".join(texts), "parts": len(texts), "tokens": tokens}


async def history(kind: Any) -> object:
    """The SDK calls the function, and sends its result: call, result, answer."""
    calls.clear()
    answer = await run(agent(kind, tools=[get_weather]), asked.CALL)
    return {"calls": list(calls), "text": answer}


async def history_streamed() -> object:
    calls.clear()
    texts, _ = await streamed(agent(CHAT, tools=[get_weather]), asked.CALL)
    return {"calls": list(calls), "text": "".join(texts)}


async def required() -> object:
    """The run ends with the tool's result, behind which the call would be required again."""
    calls.clear()
    settings = ModelSettings(tool_choice="required", parallel_tool_calls=False)
    more: dict[str, Any] = {"tools": [get_weather], "tool_use_behavior": "stop_on_first_tool"}
    await run(agent(CHAT, model_settings=settings, **more), asked.FREE)
    return {"calls": list(calls)}


async def schema(kind: Any) -> object:
    return (await run(agent(kind, output_type=City), asked.FREE)).model_dump()


def each(case: Callable[..., Awaitable[object]], *given: Any) -> Callable[[], object]:
    async def call() -> object:
        return await case(*given)

    return lambda: loop.run(call())


def failing(prompt: str, key: str = asked.KEY) -> Callable[[], object]:
    return lambda: asked.failure(lambda: loop.run(run(agent(CHAT, key), prompt)))


asked.answer(
    {
        "chat": each(text, CHAT),
        "stream": each(stream, CHAT),
        "history": each(history, CHAT),
        "history_stream": each(history_streamed),
        "required": each(required),
        "schema": each(schema, CHAT),
        "responses": each(text, RESPONSES),
        "responses_stream": each(stream, RESPONSES),
        "responses_tools": each(history, RESPONSES),
        "responses_schema": each(schema, RESPONSES),
        "too_long": failing(asked.TOO_LONG),
        "wrong_key": failing(asked.TEXT, "wrong"),
        "full": failing(asked.TEXT),
    }
)
