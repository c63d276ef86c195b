"""The clients, and the features of each that are tested: the table of docs/clients.md."""

from __future__ import annotations

from dataclasses import dataclass

from environments import NODE
from features import FEATURES

CHAT = "chat stream tools tools_stream parallel parallel_stream history required named"
ERRORS = "too_long wrong_key full"
RESPONSES = "responses responses_stream responses_tools"


@dataclass(frozen=True, slots=True)
class Client:
    name: str  # in tests' names
    title: str  # on the page
    script: str  # in tests/clients/python, or tests/clients/node for the environment NODE
    environment: str
    features: tuple[str, ...]


def client(name: str, title: str, environment: str, *features: str) -> Client:
    kind = "mjs" if environment == NODE else "py"
    asked = tuple(" ".join(features).split())
    assert set(asked) <= FEATURES.keys(), set(asked) - FEATURES.keys()
    return Client(name, title, f"{name.replace('-', '_')}.{kind}", environment, asked)


OF_TEST = (
    client(
        "openai-python",
        "OpenAI, Python",
        "clients",
        CHAT,
        "schema json_object forbidden structured_outputs reasoning",
        RESPONSES,
        "responses_tools_stream responses_schema models",
        ERRORS,
    ),
    client(
        "anthropic-python",
        "Anthropic, Python",
        "clients",
        CHAT,
        "reasoning count_tokens models",
        ERRORS,
    ),
    client(
        "langchain-python",
        "LangChain",
        "clients",
        CHAT,
        "schema json_object responses",
        ERRORS,
    ),
    client(
        "openai-node",
        "OpenAI, Node.js",
        NODE,
        CHAT,
        "schema json_object forbidden reasoning",
        RESPONSES,
        "responses_tools_stream responses_schema models",
        ERRORS,
    ),
    client(
        "vercel-ai",
        "Vercel AI SDK",
        NODE,
        CHAT,
        "history_stream schema json_object reasoning",
        RESPONSES,
        "responses_schema",
        ERRORS,
    ),
)
OTHERS = (
    client(
        "agents-python",
        "Agents SDK, Python",
        "clients-agents",
        "chat stream history history_stream required schema",
        RESPONSES,
        "responses_schema",
        ERRORS,
    ),
    client(
        "agents-node",
        "Agents SDK, Node.js",
        NODE,
        "chat stream history history_stream required schema",
        RESPONSES,
        "responses_schema",
        ERRORS,
    ),
    client(
        "langgraph-python",
        "LangGraph",
        "clients-agents",
        "chat history history_stream too_long full",
    ),
    client(
        "pydantic-ai-python",
        "Pydantic AI",
        "clients-agents",
        "chat stream history history_stream required schema reasoning responses responses_tools",
        ERRORS,
    ),
    client(
        "litellm-python",
        "LiteLLM",
        "clients-agents",
        CHAT,
        "schema json_object reasoning responses messages",
        ERRORS,
    ),
    client(
        "llama-index-python",
        "LlamaIndex",
        "clients-llama-index",
        "chat stream tools parallel history_stream required schema",
        ERRORS,
    ),
    client(
        "instructor-python",
        "Instructor",
        "clients-instructor",
        "named schema json_object",
        ERRORS,
    ),
)
CLIENTS = (*OF_TEST, *OTHERS)
