"""The clients, and the features of each that are tested: the table of docs/clients.md."""

from __future__ import annotations

from dataclasses import dataclass

from environments import NODE
from features import FEATURES

CHAT = "chat stream"
ERRORS = "too_long wrong_key full"
RESPONSES = "responses responses_stream"


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
        RESPONSES,
        "models",
        ERRORS,
    ),
    client(
        "anthropic-python",
        "Anthropic, Python",
        "clients",
        CHAT,
        "count_tokens models",
        ERRORS,
    ),
    client(
        "langchain-python",
        "LangChain",
        "clients",
        CHAT,
        "responses",
        ERRORS,
    ),
    client(
        "openai-node",
        "OpenAI, Node.js",
        NODE,
        CHAT,
        RESPONSES,
        "models",
        ERRORS,
    ),
    client(
        "vercel-ai",
        "Vercel AI SDK",
        NODE,
        CHAT,
        RESPONSES,
        ERRORS,
    ),
)
OTHERS = (
    client(
        "agents-python",
        "Agents SDK, Python",
        "clients-agents",
        "chat stream",
        RESPONSES,
        ERRORS,
    ),
    client(
        "agents-node",
        "Agents SDK, Node.js",
        NODE,
        "chat stream",
        RESPONSES,
        ERRORS,
    ),
    client(
        "pydantic-ai-python",
        "Pydantic AI",
        "clients-agents",
        "chat stream responses",
        ERRORS,
    ),
    client(
        "litellm-python",
        "LiteLLM",
        "clients-agents",
        CHAT,
        "responses",
        ERRORS,
    ),
    client(
        "llama-index-python",
        "LlamaIndex",
        "clients-llama-index",
        "chat stream",
        ERRORS,
    ),
)
CLIENTS = (*OF_TEST, *OTHERS)
