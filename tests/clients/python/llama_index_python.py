"""LlamaIndex, by its model for servers like OpenAI's."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import asked
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ConfigDict


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")  # as else the model may add to it without end
    city: Literal["Paris", "Rome"]


def made(key: str = asked.KEY, **more: Any) -> OpenAILike:
    given: dict[str, Any] = {
        "model": asked.MODEL,
        "api_base": asked.V1,
        "api_key": key,
        "max_retries": 0,
        "max_tokens": 200,
        "context_window": 65_536,
        "is_chat_model": True,
        "is_function_calling_model": True,
    }
    return OpenAILike(**{**given, **more})


model = made()
calls: list[Any] = []  # that the agent under way has had


def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Of a city."""
    calls.append(["get_weather", {"city": city}])
    return asked.RESULT


TOOL = FunctionTool.from_defaults(get_weather, fn_schema=City)


def user(text: str) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=text)]


def stream() -> object:
    texts = [each.delta for each in model.stream_chat(user(asked.TEXT)) if each.delta]
    return {"text": "".join(texts), "parts": len(texts)}


def called(prompt: str, **more: Any) -> object:
    given: Any = {"user_msg": prompt, "allow_parallel_tool_calls": True, **more}
    answer = model.chat_with_tools([TOOL], **given)
    found = model.get_tool_calls_from_response(answer)
    return {
        "calls": [[each.tool_name, each.tool_kwargs] for each in found],
        "text": answer.message.content or None,
    }


async def agent() -> object:
    """It calls the function, and sends its result, all of it streamed."""
    calls.clear()
    one = FunctionAgent(tools=[TOOL], llm=made())
    answer = await one.run(user_msg=asked.CALL)
    return {"calls": list(calls), "text": answer.response.content}


def schema() -> object:
    of = made(should_use_structured_outputs=True).as_structured_llm(City)
    found: Any = of.complete(asked.FREE).raw
    return found.model_dump()


def chat(of: OpenAILike, prompt: str) -> Any:
    return of.chat(user(prompt)).message.content


asked.answer(
    {
        "chat": lambda: {"text": chat(model, asked.TEXT)},
        "stream": stream,
        "tools": lambda: called(asked.CALL),
        "parallel": lambda: called(asked.CALLS),
        "required": lambda: called(asked.FREE, tool_required=True, allow_parallel_tool_calls=False),
        "history_stream": lambda: asyncio.run(agent()),
        "schema": schema,
        "too_long": lambda: asked.failure(lambda: chat(model, asked.TOO_LONG)),
        "wrong_key": lambda: asked.failure(lambda: chat(made("wrong"), asked.TEXT)),
        "full": lambda: asked.failure(lambda: chat(model, asked.TEXT)),
    }
)
