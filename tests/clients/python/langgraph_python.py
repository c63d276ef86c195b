"""LangGraph, by the agent of LangChain that it runs, over ChatOpenAI."""

from __future__ import annotations

from typing import Any, Literal

import asked
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Of a city."""
    return asked.RESULT


made: Any = {"api_key": asked.KEY, "max_retries": 0, "base_url": asked.V1}
agent: Any = create_agent(ChatOpenAI(model=asked.MODEL, **made), [get_weather])


def given(prompt: str) -> dict[str, Any]:
    return {"messages": asked.user(prompt)}


def read(messages: list[Any]) -> dict[str, Any]:
    calls = [c for message in messages for c in getattr(message, "tool_calls", ())]
    return {"calls": [[c["name"], c["args"]] for c in calls], "text": messages[-1].content}


def history_streamed() -> object:
    """Texts as they come, and the last state."""
    texts, state = [], None
    for mode, found in agent.stream(given(asked.CALL), stream_mode=["messages", "values"]):
        if mode == "values":
            state = found
        elif found[0].type == "AIMessageChunk" and found[0].content:
            texts.append(found[0].content)
    assert state is not None
    read_last = read(state["messages"])
    assert read_last["text"] == "".join(texts), texts
    return read_last


asked.answer(
    {
        "chat": lambda: {"text": agent.invoke(given(asked.TEXT))["messages"][-1].content},
        "history": lambda: read(agent.invoke(given(asked.CALL))["messages"]),
        "history_stream": history_streamed,
        "too_long": lambda: asked.failure(lambda: agent.invoke(given(asked.TOO_LONG))),
        "full": lambda: asked.failure(lambda: agent.invoke(given(asked.TEXT))),
    }
)
