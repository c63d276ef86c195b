"""What a client is asked to do, and what it must return. Clients return the same plain values,
whatever their own types."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outputs import CALLING, REASONING, TEXT

if TYPE_CHECKING:  # imports torch, which the page does without
    from forced_server import Served

PARIS, ROME = (["get_weather", {"city": city}] for city in ("Paris", "Rome"))
CITIES = ("Paris", "Rome")


@dataclass(frozen=True, slots=True)
class Feature:
    text: str  # of the page
    check: Callable[[Any, Served], object]  # asserts


def equals(wanted: object) -> Callable[[Any, Served], object]:
    def check(value: Any, served: Served) -> None:
        assert value == wanted, value

    return check


def streamed(value: Any, served: Served) -> None:
    """In parts, with the tokens of the output as usage; clients that show none return none. A
    process that waits for a core reads several tokens at once, so their number is open."""
    count = len(served.ids["text"][0])
    assert value["text"] == TEXT and value["parts"] > 2, value
    assert value.get("tokens", count) == count, value


def guaranteed(value: Any, served: Served) -> None:
    """The model's weights are random: only a grammar makes this call. Some clients return the
    arguments alone, as an answer of a type."""
    ((name, given),) = value.get("calls", [["get_weather", value]])
    assert name == "get_weather", value
    a_city(given, served)


def a_city(value: Any, served: Served) -> None:
    """Likewise by a grammar."""
    assert list(value) == ["city"] and value["city"] in CITIES, value


def counted(value: Any, served: Served) -> None:
    assert value["counted"] == value["spent"] > 0, value


def refused(status: int, code: str | None, *classes: str) -> Callable[[Any, Served], object]:
    """By one of the clients' own classes of errors. Some show no code, or the status as one."""

    def check(value: Any, served: Served) -> None:
        assert value["status"] == status and value["error"] in classes, value
        assert value["code"] in (code, str(status), None), value

    return check


ONE = {"calls": [PARIS], "text": None}
TWO = {"calls": [PARIS, ROME], "text": CALLING}
ANSWERED = {"calls": [PARIS], "text": TEXT}
THOUGHT = {"reasoning": REASONING, "text": TEXT}
# LangChain's and LiteLLM's, on which agents shorten their history.
OVERFLOWS = ("OpenAIContextOverflowError", "ContextWindowExceededError")
AI = "APICallError"  # Vercel's, for every status
FEATURES = {
    "chat": Feature("an answer", equals({"text": TEXT})),
    "stream": Feature("streamed, with `usage`", streamed),
    "tools": Feature("a tool call", equals(ONE)),
    "tools_stream": Feature("streamed", equals(ONE)),
    "parallel": Feature("two calls behind a text", equals(TWO)),
    "parallel_stream": Feature("streamed", equals(TWO)),
    "history": Feature("call, result, answer", equals(ANSWERED)),
    "history_stream": Feature("streamed", equals(ANSWERED)),
    "required": Feature("a call that is required", guaranteed),
    "named": Feature("a call of a named tool", guaranteed),
    "schema": Feature("an answer by a schema", a_city),
    "json_object": Feature("JSON without a schema", equals({"city": "Paris"})),
    "forbidden": Feature(
        "error: a token that the grammar forbids",
        refused(503, "grammar_failed", "InternalServerError"),
    ),
    "structured_outputs": Feature("vLLM's `structured_outputs`", a_city),
    "reasoning": Feature("reasoning apart", equals(THOUGHT)),
    "responses": Feature("Responses: an answer", equals({"text": TEXT})),
    "responses_stream": Feature("streamed", streamed),
    "responses_tools": Feature("call, result, answer", equals(ANSWERED)),
    "responses_tools_stream": Feature("two calls, streamed", equals(TWO)),
    "responses_schema": Feature("an answer by a schema", a_city),
    "messages": Feature("a call by its Anthropic form", equals({"calls": [PARIS]})),
    "count_tokens": Feature("tokens of a prompt", counted),
    "models": Feature("the list of models", equals(["tiny"])),
    "too_long": Feature(
        "error: prompt too long",
        refused(400, "context_length_exceeded", "BadRequestError", *OVERFLOWS, AI),
    ),
    "wrong_key": Feature(
        "error: wrong key",
        refused(401, "invalid_api_key", "AuthenticationError", "OpenAIAuthenticationError", AI),
    ),
    "full": Feature(
        "error: too many requests",
        refused(429, "rate_limit_exceeded", "RateLimitError", "OpenAIRateLimitError", AI),
    ),
}
