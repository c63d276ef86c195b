"""/v1/chat/completions: messages through the model's own template."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from kvline_server.engine.request import SamplingParams
from kvline_server.http.completions import envelope, prompt_logprobs, seeded, usage
from kvline_server.http.errors import BadRequest
from kvline_server.http.generate import (
    Answer,
    Generator,
    Limits,
    Piece,
    TokenScore,
    check_prompt,
    sampling,
)
from kvline_server.http.protocol import ChatRequest


class Chat:
    """One chat request, planned; the same shape as Completion."""

    def __init__(self, id: str, request: ChatRequest, generator: Generator, limits: Limits) -> None:
        self.id = id
        self.request = request
        self.generator = generator
        self.limits = limits
        self.created = int(time.time())
        self.prompts: list[list[int]] = []

    def plan(self) -> list[tuple[list[int], SamplingParams]]:
        """Renders and tokenises off the event loop. Raises BadRequest."""
        if self.generator.tokens is None:
            raise BadRequest("no tokenizer is loaded; use /v1/completions with token ids")
        request = self.request
        messages = [{"role": m.role, "content": m.text()} for m in request.messages]
        ids = self.generator.tokens.encode_chat(messages)
        check_prompt(ids, self.limits, "messages")
        self.prompts = [ids]
        asked = request.max_tokens or request.max_completion_tokens
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        params = sampling(
            request,
            self.limits,
            len(ids),
            asked or max(1, self.limits.max_model_len - len(ids)),
            logprobs,
            request.prompt_logprobs,
        )
        return [(ids, seeded(params, i)) for i in range(request.n)]

    def response(self, answers: list[Answer]) -> dict[str, Any]:
        choices = [self._choice(i, answer) for i, answer in enumerate(answers)]
        value = envelope(self, "chat.completion", choices, usage(self.prompts, answers))
        if self.request.prompt_logprobs is not None:
            value["prompt_logprobs"] = prompt_logprobs(self.generator, self.request, answers[0])
        return value

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": answer.text},
            "finish_reason": answer.finish,
            "logprobs": self._logprobs(answer.scores),
        }

    def _logprobs(self, scores: list[TokenScore]) -> dict[str, Any] | None:
        if not self.request.logprobs:
            return None
        top = self.request.top_logprobs or 0
        return {
            "content": [
                {
                    **self._entry(s.token, s.logprob),
                    "top_logprobs": [self._entry(t, v) for t, v in s.top[:top]],
                }
                for s in scores
            ]
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self.generator.token_bytes(token)
        return {
            "token": raw.decode("utf-8", "replace"),
            "logprob": logprob,
            "bytes": list(raw),
        }

    async def events(
        self, index: int, prompt: list[int], params: SamplingParams, totals: list[Answer]
    ) -> AsyncGenerator[bytes, None]:
        async with aclosing(self.generator.follow(prompt, params, self.request.stops())) as pieces:
            async for piece in pieces:
                totals[index].add(piece)
                if piece.text or piece.scores or piece.finish:
                    yield self._chunk(index, piece)

    def _chunk(self, index: int, piece: Piece) -> bytes:
        delta = {"content": piece.text} if piece.text else {}
        return self.frame(
            [
                {
                    "index": index,
                    "delta": delta,
                    "finish_reason": piece.finish,
                    "logprobs": self._logprobs(piece.scores) if piece.scores else None,
                }
            ]
        )

    def frame(self, choices: list[dict[str, Any]], used: dict[str, Any] | None = None) -> bytes:
        return msgspec.json.encode(envelope(self, "chat.completion.chunk", choices, used))

    def opening(self, choices: int) -> list[bytes]:
        """OpenAI's first chunk of each choice names the role."""
        return [
            self.frame(
                [{"index": i, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]
            )
            for i in range(choices)
        ]
