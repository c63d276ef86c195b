"""Follows sequences of the engine, and gives their answers in pieces.

Completions and chat differ only in the JSON of these.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvline_server.http.admission import Room
from kvline_server.http.chat_tokens import ChatTokens
from kvline_server.http.engine_client import EngineClient
from kvline_server.http.errors import BadRequest
from kvline_server.http.pieces import Answer, Piece, Writing
from kvline_server.http.protocol.generation import GenerationRequest
from kvline_server.http.reading import Reading
from kvline_server.http.scores import held_outputs
from kvline_server.http.tokens import Tokens
from kvline_server.http.trace import Traces
from kvline_server.ipc.messages import Delta
from kvline_server.ipc.sampling_params import SamplingParams

if TYPE_CHECKING:
    from kvline_server.http.image_store import Held
    from kvline_server.http.images import Images

# One chunk of an answer has at most so many tokens, and so many with their alternatives: those that
# wait for a client are small.
MOST, MOST_SCORED = 16, 64


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of a request, from the model and the validated engine."""

    served_name: str
    vocabulary: int
    max_model_len: int
    max_top_logprobs: int
    max_prompt_tokens: int  # of the KV cache, of all prompts of a request
    default_max_tokens: int | None = None  # of a chat that asks for no number
    fingerprint: str | None = None  # of all that pods of one revision have in common
    max_sequence_tokens: int | None = None  # of the KV cache, of a prompt; None: all of its own

    def kv_tokens(self, prompt: list[int]) -> int:
        """That it takes of the KV cache."""
        most = self.max_sequence_tokens
        return len(prompt) if most is None else min(len(prompt), most)


class Generator:
    def __init__(
        self,
        engine: EngineClient,
        tokens: Tokens | None,
        traces: Traces,
        chat: ChatTokens | None = None,
    ) -> None:
        self.engine = engine
        self.tokens = tokens
        self.chat = chat
        self.traces = traces
        self.images: Images | None = None  # None: text alone is taken

    async def follow(
        self,
        prompt: list[int],
        params: SamplingParams,
        stops: list[str],
        arrived: float,
        reading: Reading | None = None,
        images: Held | None = None,
    ) -> AsyncGenerator[Piece, None]:
        """Yields pieces until the end; closing the generator early aborts the sequence. `arrived`:
        when its request had come, by time.monotonic; `reading`: None where all is text; `images` of
        the prompt."""
        latencies, first = self.engine.latencies, True
        writing = Writing(self.tokens, params, stops, reading)
        most = min(MOST, max(1, MOST_SCORED // (1 + (params.logprobs or 0))))
        if reading is not None and params.logprobs is not None:
            most = 1  # so that it is known which tokens an event has come of
        async with AsyncExitStack() as stack:
            trace = self.traces.sequence(len(prompt))
            if trace is not None:
                stack.callback(trace.end)
            made = self.engine.generate(prompt, params, images)
            deltas = await stack.enter_async_context(aclosing(made))
            async for batch in deltas:
                if first:
                    first = False
                    latencies.first_token.add(time.monotonic() - arrived)
                    latencies.queue.add(batch[0].waited_ms / 1000)
                if trace is not None:
                    trace.receive(batch)
                singles = [single for delta in batch for single in _singles(delta)]
                for start in range(0, len(singles), most):
                    piece = Piece()
                    for single in singles[start : start + most]:
                        writing.add(piece, single)
                        if writing.ended:
                            break
                    yield piece
                    if writing.ended:
                        break
                if writing.ended:
                    break
            latencies.whole.add(time.monotonic() - arrived)

    async def answer(
        self,
        prompt: list[int],
        params: SamplingParams,
        stops: list[str],
        arrived: float,
        room: Room,
        reading: Reading | None,
        images: Held | None,
    ) -> Answer:
        out = Answer()
        async with aclosing(self.follow(prompt, params, stops, arrived, reading, images)) as pieces:
            async for piece in pieces:
                room.hold(held_outputs(piece.scores))
                out.add(piece)
        return out

    async def answers(
        self,
        jobs: list[tuple[list[int], SamplingParams]],
        stops: list[str],
        arrived: float,
        room: Room,
        reading: Reading | None = None,
        images: Held | None = None,
    ) -> list[Answer]:
        """All answers of a request at once, with room for their scores; one failure ends the
        others."""
        shared = stops, arrived, room, reading, images
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self.answer(prompt, params, *shared)) for prompt, params in jobs
            ]
        return [task.result() for task in tasks]

    def token_text(self, token: int) -> str:
        return self.tokens.token_text(token) if self.tokens is not None else f"token_id:{token}"

    def token_bytes(self, token: int) -> bytes:
        return self.tokens.token_bytes(token) if self.tokens is not None else b""


def _singles(delta: Delta) -> Iterator[Delta]:
    """One for each token, as an answer may end at any of them."""
    if len(delta.tokens) == 1:
        yield delta
        return
    last = len(delta.tokens) - 1
    for index, token in enumerate(delta.tokens):
        yield Delta(
            delta.id,
            [token],
            delta.finish if index == last else None,
            delta.scores.row(index) if delta.scores is not None else None,
            delta.prompt_scores if index == 0 else [],
            delta.cached,
        )


def sampling(
    request: GenerationRequest,
    limits: RequestLimits,
    prompt_length: int,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """The engine's parameters; of `max_tokens` as many as the context leaves. Raises BadRequest
    where it leaves none, or the request exceeds another limit of this model."""
    for name, value in (("logprobs", logprobs), ("prompt_logprobs", prompt_logprobs)):
        if value is not None and value > limits.max_top_logprobs:
            raise BadRequest(f"{name}: this server gives at most {limits.max_top_logprobs}", name)
    room = limits.max_model_len - prompt_length
    if max_tokens and room < 1:
        raise BadRequest(
            f"{request.prompt_field}: {prompt_length} tokens leave none of the context of "
            f"{limits.max_model_len} for an answer",
            request.prompt_field,
            "context_length_exceeded",
        )
    if request.most() is None:
        max_tokens = max(max_tokens, request.min_tokens)
    max_tokens = min(max_tokens, room)  # agents ask every model for the same large number
    if request.min_tokens > max_tokens:
        raise BadRequest(
            f"min_tokens: more than the {max_tokens} that are asked for and fit the context",
            "min_tokens",
        )
    bias = {int(key): value for key, value in (request.logit_bias or {}).items()}
    if any(token >= limits.vocabulary for token in bias):
        raise BadRequest(f"logit_bias: token ids are below {limits.vocabulary}", "logit_bias")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=max(0, request.top_k),
        min_p=request.min_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias=bias,
        seed=request.seed if request.seed is not None else secrets.randbits(63),
        ignore_eos=request.ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        cache_salt=request.cache_salt or "",
    )


def check_prompt(prompt: list[int], limits: RequestLimits, name: str) -> None:
    if not prompt:
        raise BadRequest(f"{name}: must hold at least one token", name)
    if len(prompt) > limits.max_model_len:
        raise BadRequest(
            f"{name}: {len(prompt)} tokens, the context is {limits.max_model_len}",
            name,
            "context_length_exceeded",
        )
    if max(prompt) >= limits.vocabulary:
        raise BadRequest(f"{name}: token ids are below {limits.vocabulary}", name)
