"""LangChain's ChatOpenAI."""

from __future__ import annotations

from typing import Any, Literal

import asked
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


def made(**more: Any) -> ChatOpenAI:
    given: dict[str, Any] = {"api_key": asked.KEY, "max_retries": 0, "max_tokens": 200, **more}
    return ChatOpenAI(model=asked.MODEL, base_url=asked.V1, **given)


class City(BaseModel):
    """A city."""

    city: Literal["Paris", "Rome"]


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Of a city."""
    return asked.RESULT


model = made(stream_usage=True)
bound: Any = model.bind_tools([get_weather])


def read(message: Any) -> dict[str, Any]:
    calls = [[call["name"], call["args"]] for call in message.tool_calls]
    return {"calls": calls, "text": message.content or None}


def stream() -> object:
    chunks = list(model.stream(asked.TEXT))
    texts = [chunk.content for chunk in chunks if chunk.content]
    (usage,) = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    return {
        "text": "".join(map(str, texts)),
        "parts": len(texts),
        "tokens": usage["output_tokens"],
    }


def tools_streamed(prompt: str) -> object:
    first, *rest = bound.stream(prompt)
    for chunk in rest:
        first += chunk
    return read(first)


def history() -> object:
    """A call, its result, and the answer."""
    messages: list[Any] = [HumanMessage(asked.CALL)]
    first = bound.invoke(messages)
    (call,) = first.tool_calls
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage), result
    second = bound.invoke([*messages, first, result])
    return {"calls": read(first)["calls"], "text": second.content}


def structured(method: str) -> object:
    prompt = asked.OBJECT if method == "json_mode" else asked.FREE
    strict = {} if method == "json_mode" else {"strict": True}
    given: Any = {"method": method, **strict}
    chain: Any = model.with_structured_output(City, **given)
    return chain.invoke(prompt).model_dump()


def required() -> object:
    """Strict, as else the model may add arguments of its own until its tokens are spent."""
    given: Any = {"tool_choice": "required", "parallel_tool_calls": False, "strict": True}
    return read(model.bind_tools([get_weather], **given).invoke(asked.FREE))


def too_long() -> object:
    return asked.failure(lambda: model.invoke(asked.TOO_LONG))


def wrong_key() -> object:
    return asked.failure(lambda: made(api_key="wrong").invoke(asked.TEXT))


def responses() -> object:
    return {"text": made(use_responses_api=True).invoke(asked.TEXT).text}


asked.answer(
    {
        "chat": lambda: {"text": model.invoke(asked.TEXT).content},
        "stream": stream,
        **asked.calls(lambda text: read(bound.invoke(text)), tools_streamed),
        "history": history,
        "required": required,
        "named": lambda: structured("function_calling"),
        "schema": lambda: structured("json_schema"),
        "json_object": lambda: structured("json_mode"),
        "responses": responses,
        "too_long": too_long,
        "wrong_key": wrong_key,
        "full": lambda: asked.failure(lambda: model.invoke(asked.TEXT)),
    }
)
