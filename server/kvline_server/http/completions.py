"""/v1/completions: prompts as text or token ids, echo, logprobs, prompt_logprobs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from kvline_server.http.envelope import Route, whole
from kvline_server.http.errors import BadRequest
from kvline_server.http.generate import Generator, check_prompt, sampling
from kvline_server.http.later import Later
from kvline_server.http.packed import base64_arrays
from kvline_server.http.pieces import Answer, Piece
from kvline_server.http.protocol.completions import CompletionRequest
from kvline_server.http.protocol.generation import GenerationRequest
from kvline_server.http.scores import TokenScore, between, chosen, unpack
from kvline_server.ipc import seeds
from kvline_server.ipc.messages import PackedScores
from kvline_server.ipc.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 16  # OpenAI's
ECHO_TOKENS = 8  # tokens per event of a streamed prompt with logprobs; events are buffered


@dataclass(frozen=True, slots=True)
class Echoed:
    """An echoed prompt, with the offsets of its tokens if logprobs are listed."""

    text: str
    offsets: list[int]


@dataclass(eq=False)
class Completion(Route[CompletionRequest]):
    """Its prompts, one job per choice, and the JSON of its answers."""

    chunk_kind, id_prefix = "text_completion", "cmpl-"

    _echoes: list[Echoed] = field(init=False, default_factory=list)  # by prompt, if asked for

    def plan(self) -> list[tuple[list[int], SamplingParams]]:
        """Tokenises; may take a while, so it runs off the event loop. Raises BadRequest."""
        if self.request.stops() and self.generator.tokens is None:
            raise BadRequest("stop: no tokenizer is loaded, so answers have no text", "stop")
        jobs, total = [], 0
        for prompt in self.request.prompt:
            ids = self._encode(prompt)
            check_prompt(ids, self.limits, "prompt")
            total += self.limits.kv_tokens(ids)
            if total > self.limits.max_prompt_tokens:
                most = self.limits.max_prompt_tokens
                raise BadRequest(
                    f"prompt: this server takes {most} KV tokens in a request", "prompt"
                )
            self.prompts.append(ids)
            if self.request.echo:
                self._echoes.append(self._echo_of(prompt, ids))
            params = self._params(len(ids))
            jobs += [(ids, seeded(params, i)) for i in range(self.request.n)]
        self.request.prompt = []  # the texts take memory, and what is echoed is kept
        return jobs

    def _encode(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        if not prompt:
            raise BadRequest("prompt: must not be empty", "prompt")
        if self.generator.tokens is None:
            raise BadRequest("prompt: no tokenizer is loaded; send token ids", "prompt")
        return self.generator.tokens.encode(prompt, self.limits.max_model_len)

    def _params(self, length: int) -> SamplingParams:
        request = self.request
        asked = request.most()
        asked = DEFAULT_MAX_TOKENS if asked is None else asked
        echoed = request.logprobs if request.echo else None
        prompt_logprobs = request.prompt_logprobs
        if echoed is not None:
            prompt_logprobs = max(echoed, prompt_logprobs or 0)
        return sampling(request, self.limits, length, asked, request.logprobs, prompt_logprobs)

    def response(self, answers: list[Answer]) -> dict[str, Any]:
        n = self.request.n
        choices = [self._choice(i, i // n, answer) for i, answer in enumerate(answers)]
        return whole(self, "text_completion", choices, answers)

    def _choice(self, index: int, prompt: int, answer: Answer) -> dict[str, Any]:
        request = self.request
        shown, head = answer, None
        if request.echo:
            echoed, head = self._echoes[prompt], self.prompts[prompt][0]
            shown = replace(
                answer,
                text=echoed.text + answer.text,
                scores=answer.prompt_scores + answer.scores,
                offsets=echoed.offsets + [len(echoed.text) + at for at in answer.offsets],
            )
        choice = self._worded(index, shown, head)
        if request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self.generator, request, answer)
        return choice

    def _worded(self, index: int, piece: Piece, head: int | None = None) -> dict[str, Any]:
        """The JSON of a choice, or of a chunk of it."""
        top, logprobs = self.request.logprobs, None
        if top is not None and piece.offsets:
            logprobs = legacy_logprobs(self.generator, piece.scores, top, head, piece.offsets)
        return {
            "index": index,
            "text": piece.text,
            "finish_reason": piece.finish,
            "logprobs": logprobs,
        }

    def _echo_of(self, given: str | list[int], ids: list[int]) -> Echoed:
        """May take as long as tokenising, and as much memory."""
        tokens = self.generator.tokens
        if tokens is None:
            return Echoed("", [0] * len(ids))
        listed = self.request.logprobs is not None
        if isinstance(given, str):
            return Echoed(given, tokens.offsets_of_text(ids, given) if listed else [])
        text = tokens.decode(ids)
        return Echoed(text, tokens.offsets(ids, text) if listed else [])

    def parts(self, index: int, piece: Piece) -> Iterable[dict[str, Any]]:
        if self.request.echo:
            shift = len(self._echoes[index // self.request.n].text)
            piece = replace(piece, offsets=[shift + at for at in piece.offsets])
        return [self._worded(index, piece)]

    def echo(self, index: int, prompt: list[int], first: Piece) -> Iterator[dict[str, Any]]:
        """The echoed prompt as chunks; several of them where its logprobs are listed."""
        if not self.request.echo:
            return
        echoed = self._echoes[index // self.request.n]
        text, offsets = echoed.text, echoed.offsets
        if not offsets:
            yield self._worded(index, Piece(text))
        for start in range(0, len(offsets), ECHO_TOKENS):
            end = start + ECHO_TOKENS
            until = offsets[end] if end < len(offsets) else len(text)
            piece = Piece(
                text[offsets[start] if start else 0 : until],
                scores=between(first.prompt_scores, max(0, start - 1), end - 1),
                offsets=offsets[start:end],
            )
            yield self._worded(index, piece, None if start else prompt[0])


def legacy_logprobs(
    generator: Generator,
    scores: list[PackedScores],
    top: int,
    head: int | None,
    offsets: list[int],
) -> dict[str, Any]:
    """OpenAI's completion logprobs. `head` is an echoed first token, which has no logprob."""

    def texts() -> Iterator[str]:
        if head is not None:
            yield generator.token_text(head)
        for token, _ in chosen(scores):
            yield generator.token_text(token)

    def values() -> Iterator[float | None]:
        if head is not None:
            yield None
        for _, value in chosen(scores):
            yield value

    def tops() -> Iterator[dict[str, float] | None]:
        if head is not None:
            yield None
        for score in unpack(scores):
            yield _top(generator, score, top)

    return {
        "tokens": Later(texts),
        "token_logprobs": Later(values),
        "top_logprobs": Later(tops) if top else None,
        "text_offset": offsets,
    }


def _top(generator: Generator, score: TokenScore, top: int) -> dict[str, float]:
    """Top logprobs by text, the sampled token included. Of tokens with the same text (parts of a
    character) the likeliest is kept: clients take the maximum for the greedy token."""
    out: dict[str, float] = {}
    for token, value in [*score.top[:top], (score.token, score.logprob)]:
        out.setdefault(generator.token_text(token), value)
    return out


def prompt_logprobs(
    generator: Generator, request: GenerationRequest, answer: Answer
) -> Later | dict[str, Any]:
    """One entry per prompt token, the first null: token id -> logprob, rank, text. With
    prompt_logprobs_format base64, arrays of every token but the first."""
    top = request.prompt_logprobs or 0
    if request.prompt_logprobs_format == "base64":
        return base64_arrays(answer.prompt_scores, top)

    def entries() -> Iterator[dict[str, Any] | None]:
        yield None
        for score in unpack(answer.prompt_scores):
            yield _entry(generator, score, top)

    return Later(entries)


def _entry(generator: Generator, s: TokenScore, top: int) -> dict[str, Any]:
    entries = {token: (value, rank + 1) for rank, (token, value) in enumerate(s.top[:top])}
    entries.setdefault(s.token, (s.logprob, s.rank))
    return {
        str(token): {
            "logprob": value,
            "rank": rank,
            "decoded_token": generator.token_text(token),
        }
        for token, (value, rank) in entries.items()
    }


def seeded(params: SamplingParams, choice: int) -> SamplingParams:
    """The parameters of a choice, with a seed of its own."""
    return msgspec.structs.replace(params, seed=seeds.of_choice(params.seed, choice))
