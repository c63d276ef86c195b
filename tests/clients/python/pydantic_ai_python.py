"""Pydantic AI, by its provider for OpenAI's API and the one for vLLM."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import asked
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.messages import ToolCallPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.providers.vllm import VLLMProvider


class City(BaseModel):
    city: Literal["Paris", "Rome"]


def client(key: str = asked.KEY) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=asked.V1, api_key=key, max_retries=0)


def agent(key: str = asked.KEY, kind: Any = OpenAIChatModel, **more: Any) -> Agent[Any, Any]:
    provider = OpenAIProvider(openai_client=client(key))
    return Agent(kind(asked.MODEL, provider=provider), retries=0, **more)


def weather(**more: Any) -> Agent[Any, Any]:
    made = agent(**more)

    @made.tool_plain
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """Of a city."""
        return asked.RESULT

    return made


def calls_of(result: Any) -> list[Any]:
    parts = [part for message in result.all_messages() for part in message.parts]
    return [[p.tool_name, p.args_as_dict()] for p in parts if isinstance(p, ToolCallPart)]


def history(**more: Any) -> object:
    result = run(weather(**more), asked.CALL)
    return {"calls": calls_of(result), "text": result.output}


def run(of: Agent[Any, Any], prompt: str) -> Any:
    """In an event loop of its own, with clients of its own."""
    return asyncio.run(of.run(prompt))


async def streamed(of: Agent[Any, Any], prompt: str) -> tuple[list[str], Any]:
    async with of.run_stream(prompt) as result:
        texts = [text async for text in result.stream_text(delta=True, debounce_by=None)]
        return texts, result


def stream() -> object:
    texts, result = asyncio.run(streamed(agent(), asked.TEXT))
    tokens = result.usage.output_tokens
    return {"text": "".join(texts), "parts": len(texts), "tokens": tokens}


def history_streamed() -> object:
    texts, result = asyncio.run(streamed(weather(), asked.CALL))
    return {"calls": calls_of(result), "text": "".join(texts)}


def chat() -> object:
    """By the provider for vLLM."""
    made = VLLMProvider(openai_client=client())
    of = Agent(OpenAIChatModel(asked.MODEL, provider=made), instructions="Be short.")
    return {"text": run(of, asked.TEXT).output}


def responses() -> object:
    return {"text": run(agent(kind=OpenAIResponsesModel), asked.TEXT).output}


def reasoning() -> object:
    result = run(agent(), asked.REASONING)
    thoughts = [p.content for p in result.all_messages()[-1].parts if p.part_kind == "thinking"]
    return {"reasoning": "".join(thoughts), "text": result.output}


def failing(prompt: str, key: str = asked.KEY) -> object:
    """Its error has the client's behind it."""

    def call() -> object:
        try:
            return run(agent(key), prompt)
        except Exception as error:
            raise error.__cause__ or error from None

    return asked.failure(call)


ONE: dict[str, Any] = {"model_settings": {"parallel_tool_calls": False}}
asked.answer(
    {
        "chat": chat,
        "stream": stream,
        "history": history,
        "history_stream": history_streamed,
        # A plain type is the argument of a call that is required.
        "required": lambda: run(agent(output_type=City, **ONE), asked.FREE).output.model_dump(),
        "schema": lambda: run(
            agent(output_type=NativeOutput(City)), asked.FREE
        ).output.model_dump(),
        "reasoning": reasoning,
        "responses": responses,
        "responses_tools": lambda: history(kind=OpenAIResponsesModel),
        "too_long": lambda: failing(asked.TOO_LONG),
        "wrong_key": lambda: failing(asked.TEXT, "wrong"),
        "full": lambda: failing(asked.TEXT),
    }
)
