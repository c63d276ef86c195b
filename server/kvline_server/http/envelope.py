"""What every answer of both routes shares, whole or in chunks: its fields, and what it used."""

from __future__ import annotations

from typing import Any, Protocol

from kvline_server.http.generate import Answer, Limits
from kvline_server.http.later import encode
from kvline_server.http.protocol import GenerationRequest, StreamOptions


class Work(Protocol):
    """One planned request."""

    id: str
    created: int
    limits: Limits
    prompts: list[list[int]]
    chunk_kind: str

    @property
    def request(self) -> GenerationRequest: ...


def whole(
    work: Work, kind: str, choices: list[dict[str, Any]], answers: list[Answer]
) -> dict[str, Any]:
    return {**_fields(work, kind, choices), "usage": usage(work.prompts, answers)}


def chunk(
    work: Work, choices: list[dict[str, Any]], totals: list[Answer], last: bool = False
) -> bytes:
    """One event of a stream. With include_usage each has `usage`: null but in the last, or with
    continuous_usage_stats what the request has used so far."""
    value = _fields(work, work.chunk_kind, choices)
    options = work.request.stream_options or StreamOptions()
    if last or options.continuous_usage_stats:
        value["usage"] = usage(work.prompts, totals)
    elif options.include_usage:
        value["usage"] = None
    return b"".join(encode(value))


def _fields(work: Work, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """In OpenAI's order."""
    return {
        "id": work.id,
        "object": kind,
        "created": work.created,
        "model": work.limits.served_name,
        "choices": choices,
    }


def usage(prompts: list[list[int]], answers: list[Answer]) -> dict[str, Any]:
    """A prompt counts once, however many choices it has; so does what of it was cached, and that
    is what no choice had to compute."""
    n = len(answers) // len(prompts)
    prompt = sum(len(p) for p in prompts)
    output = sum(a.tokens for a in answers)
    cached = sum(min(a.cached for a in answers[i : i + n]) for i in range(0, len(answers), n))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
