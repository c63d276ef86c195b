"""/v1/completions: prompts as text or token ids, echo, logprobs, prompt_logprobs."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

import msgspec

from kvline_server.engine.request import SamplingParams
from kvline_server.http.errors import BadRequest
from kvline_server.http.generate import (
    Answer,
    Generator,
    Limits,
    Piece,
    TokenScore,
    check_prompt,
    sampling,
    unpack,
)
from kvline_server.http.packed import base64_arrays
from kvline_server.http.protocol import CompletionRequest, GenerationRequest

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class Completion:
    """One request, planned: its prompts, one job a choice, and how answers are worded."""

    def __init__(
        self, id: str, request: CompletionRequest, generator: Generator, limits: Limits
    ) -> None:
        self.id = id
        self.request = request
        self.generator = generator
        self.limits = limits
        self.created = int(time.time())
        self.prompts: list[list[int]] = []

    def plan(self) -> list[tuple[list[int], SamplingParams]]:
        """Tokenises; may take a while, so it runs off the event loop. Raises BadRequest."""
        jobs = []
        for prompt in self.request.prompt:
            ids = self._encode(prompt)
            check_prompt(ids, self.limits, "prompt")
            self.prompts.append(ids)
            params = self._params(len(ids))
            jobs += [(ids, seeded(params, i)) for i in range(self.request.n)]
        return jobs

    def _encode(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        if not prompt.strip():
            raise BadRequest("prompt: must not be empty", "prompt")
        if self.generator.tokens is None:
            raise BadRequest("prompt: no tokenizer is loaded; send token ids", "prompt")
        return self.generator.tokens.encode(prompt)

    def _params(self, length: int) -> SamplingParams:
        request = self.request
        asked = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        if request.max_tokens is None:
            asked = max(1, min(asked, self.limits.max_model_len - length))
        echoed = request.logprobs if request.echo else None
        prompt_logprobs = request.prompt_logprobs
        if echoed is not None:
            prompt_logprobs = max(echoed, prompt_logprobs or 0)
        return sampling(request, self.limits, length, asked, request.logprobs, prompt_logprobs)

    def response(self, answers: list[Answer]) -> dict[str, Any]:
        n = self.request.n
        choices = [self._choice(i, i // n, answer) for i, answer in enumerate(answers)]
        return envelope(self, "text_completion", choices, usage(self.prompts, answers))

    def _choice(self, index: int, prompt: int, answer: Answer) -> dict[str, Any]:
        request = self.request
        text, scores, missing = answer.text, answer.scores, False
        ids = self.prompts[prompt]
        if request.echo:
            given = request.prompt[prompt]
            text = (given if isinstance(given, str) else self._decode(given)) + text
            scores, missing = unpack(answer.prompt_scores) + scores, True
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "finish_reason": answer.finish,
            "logprobs": None,
        }
        if request.logprobs is not None:
            head = ids[0] if missing else None
            choice["logprobs"] = legacy_logprobs(self.generator, scores, request.logprobs, head, 0)
        if request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self.generator, request, answer)
        return choice

    def _decode(self, ids: list[int]) -> str:
        return self.generator.tokens.decode(ids) if self.generator.tokens is not None else ""

    async def events(
        self, index: int, prompt: list[int], params: SamplingParams, totals: list[Answer]
    ) -> AsyncGenerator[bytes, None]:
        """Server-sent chunks of one choice; adds what it saw to `totals[index]`."""
        offset = 0
        async with aclosing(self.generator.follow(prompt, params, self.request.stops())) as pieces:
            async for piece in pieces:
                totals[index].add(piece)
                if piece.text or piece.scores or piece.finish:
                    yield self._chunk(index, piece, offset)
                    offset += len(piece.text)

    def _chunk(self, index: int, piece: Piece, offset: int) -> bytes:
        logprobs = None
        if self.request.logprobs is not None and piece.scores:
            logprobs = legacy_logprobs(
                self.generator, piece.scores, self.request.logprobs, None, offset
            )
        return self.frame(
            [
                {
                    "index": index,
                    "text": piece.text,
                    "finish_reason": piece.finish,
                    "logprobs": logprobs,
                }
            ]
        )

    def frame(self, choices: list[dict[str, Any]], used: dict[str, Any] | None = None) -> bytes:
        return msgspec.json.encode(envelope(self, "text_completion", choices, used))

    def opening(self, choices: int) -> list[bytes]:
        return []


def legacy_logprobs(
    generator: Generator, scores: list[TokenScore], top: int, head: int | None, offset: int
) -> dict[str, Any]:
    """OpenAI's completion logprobs. `head` is an echoed first token, which has no logprob."""
    texts = [generator.token_text(s.token) for s in scores]
    values: list[float | None] = [s.logprob for s in scores]
    tops: list[dict[str, float] | None] = [
        {generator.token_text(t): v for t, v in s.top[:top]} for s in scores
    ]
    if head is not None:
        texts.insert(0, generator.token_text(head))
        values.insert(0, None)
        tops.insert(0, None)
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": values,
        "top_logprobs": tops if top else None,
        "text_offset": offsets,
    }


def prompt_logprobs(
    generator: Generator, request: GenerationRequest, answer: Answer
) -> list[dict[str, Any] | None] | dict[str, Any]:
    """One entry a prompt token, the first null: token id -> logprob, rank, text. Or the arrays, of
    every token but the first."""
    top = request.prompt_logprobs or 0
    if request.prompt_logprobs_format == "base64":
        return base64_arrays(answer.prompt_scores, top)
    out: list[dict[str, Any] | None] = [None]
    for s in unpack(answer.prompt_scores):
        entries = {token: (value, rank + 1) for rank, (token, value) in enumerate(s.top[:top])}
        entries.setdefault(s.token, (s.logprob, s.rank))
        out.append(
            {
                str(token): {
                    "logprob": value,
                    "rank": rank,
                    "decoded_token": generator.token_text(token),
                }
                for token, (value, rank) in entries.items()
            }
        )
    return out


class Worded(Protocol):
    """What every answer's envelope is made of."""

    id: str
    created: int
    limits: Limits


def envelope(
    work: Worded, kind: str, choices: list[dict[str, Any]], used: dict[str, Any] | None
) -> dict[str, Any]:
    """The fields that whole answers and chunks of both routes share, in OpenAI's order."""
    value: dict[str, Any] = {
        "id": work.id,
        "object": kind,
        "created": work.created,
        "model": work.limits.served_name,
        "choices": choices,
    }
    if used is not None:
        value["usage"] = used
    return value


def usage(prompts: list[list[int]], answers: list[Answer]) -> dict[str, Any]:
    prompt = sum(len(p) for p in prompts)
    output = sum(a.tokens for a in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(a.cached for a in answers)},
    }


def seeded(params: SamplingParams, choice: int) -> SamplingParams:
    """Each of a prompt's choices draws its own numbers."""
    return msgspec.structs.replace(params, seed=(params.seed + choice) & (2**63 - 1))
