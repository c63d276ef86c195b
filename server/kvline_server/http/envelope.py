"""Fields that answers of both routes share, whole or as chunks of a stream, and `usage`."""

from __future__ import annotations

from typing import Any, Protocol

from kvline_server.http.generate import Answer, Limits
from kvline_server.http.later import encode
from kvline_server.http.protocol import GenerationRequest, StreamOptions

NO_OPTIONS = StreamOptions()


class Work(Protocol):
    """A planned request."""

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
    """One event of a stream. With include_usage each has `usage`: null except in the last one; with
    continuous_usage_stats, the usage so far in each."""
    value = _fields(work, work.chunk_kind, choices)
    options = work.request.stream_options or NO_OPTIONS
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
    """A prompt counts once, however many choices it has. Its cached tokens count once too: the
    fewest of its choices, so tokens that no choice had to compute."""
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
