"""/v1/chat/completions: renders messages with the model's chat template."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from kvline_server.http import image_parts
from kvline_server.http.answering import Answering
from kvline_server.http.chat_tokens import Rendered
from kvline_server.http.completions import prompt_logprobs, seeded
from kvline_server.http.conversation import asked, rendered
from kvline_server.http.envelope import Chunks, Route, whole
from kvline_server.http.errors import BadRequest
from kvline_server.http.generate import check_prompt, sampling
from kvline_server.http.later import Later
from kvline_server.http.message import call_id, delta, message
from kvline_server.http.pieces import Answer, Piece
from kvline_server.http.protocol.chat import ChatRequest
from kvline_server.http.reading import budget, reading
from kvline_server.http.scores import unpack
from kvline_server.ipc.messages import PackedScores
from kvline_server.ipc.sampling_params import SamplingParams

if TYPE_CHECKING:
    from kvline_server.http.images import File
    from kvline_server.images.positions import Placed


class Chat(Route[ChatRequest]):
    chunk_kind, id_prefix = "chat.completion.chunk", "chatcmpl-"

    model: Answering  # as it answers; known once the messages are rendered
    rendered: Rendered | None = None
    files: Sequence[File] = ()  # of its images, until these are decoded
    placed: Sequence[Placed] = ()  # their tokens, in the prompt

    def render(self) -> Rendered:
        """Runs off the event loop. Raises BadRequest."""
        if self.generator.chat is None:
            raise BadRequest("no tokenizer is loaded; use /v1/completions with token ids")
        request, chat = self.request, self.generator.chat
        self.model = chat.answering
        self.files = image_parts.read(request.messages, self.generator.images)
        with image_parts.written(self.files):
            self.rendered = chat.render(rendered(request.messages), asked(request))
        self.reading = reading(request, self.model, self.rendered[0])
        request.messages, request.documents, request.tools = [], None, None  # they take memory
        return self.rendered

    def plan(self) -> list[tuple[list[int], SamplingParams]]:
        """Tokenises, and renders before where that was not done; runs off the event loop. Raises
        BadRequest. -> (token ids, parameters) of each choice"""
        rendered, self.rendered = self.rendered or self.render(), None
        request, chat = self.request, self.generator.chat
        assert chat is not None
        most, images = self.limits.max_model_len, self.generator.images
        if self.files and images is not None:
            with image_parts.written(self.files):
                ids, self.placed = images.tokenise(chat, rendered, most, self.files)
            self.image_tokens = sum(file.grid.tokens for file in self.files)
        else:
            ids = chat.tokenise(rendered, most)
        check_prompt(ids, self.limits, "messages")
        self.prompts = [ids]
        most = request.most() or self.limits.default_max_tokens or self.limits.max_model_len
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        params = sampling(
            request,
            self.limits,
            len(ids),
            most,
            logprobs,
            request.prompt_logprobs,
        )
        thinking = budget(request, self.model, self.reading)
        params = msgspec.structs.replace(params, thinking=thinking)
        return [(ids, seeded(params, i)) for i in range(request.n)]

    def response(self, answers: list[Answer]) -> dict[str, Any]:
        choices = [self._choice(i, answer) for i, answer in enumerate(answers)]
        value = whole(self, "chat.completion", choices, answers)
        if self.request.prompt_logprobs is not None:
            value["prompt_logprobs"] = prompt_logprobs(self.generator, self.request, answers[0])
        return value

    def _choice(self, index: int, answer: Answer) -> dict[str, Any]:
        return {
            "index": index,
            "message": message(answer, self.model),
            "finish_reason": answer.finish,
            "logprobs": self._logprobs(answer.scores),
        }

    def _logprobs(self, scores: list[PackedScores]) -> dict[str, Any] | None:
        if not self.request.logprobs:
            return None
        return {"content": Later(lambda: self.entries(scores))}

    def entries(self, scores: list[PackedScores]) -> Iterator[dict[str, Any]]:
        """Of each token, with its alternatives."""
        top = self.request.top_logprobs or 0
        for s in unpack(scores):
            best = [self._entry(t, v) for t, v in s.top[:top]]
            yield {**self._entry(s.token, s.logprob), "top_logprobs": best}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self.generator.token_bytes(token)
        return {
            "token": raw.decode("utf-8", "replace"),
            "logprob": logprob,
            "bytes": list(raw),
        }

    def parts(self, index: int, piece: Piece) -> Iterable[dict[str, Any]]:
        """A chunk for each event: clients read one kind of delta from each."""
        shown = [delta(event, self.model) for event in piece.written()]
        deltas = [each for each in shown if each is not None]
        if not deltas and not piece.goes_on:
            deltas = [{}]
        for at, each in enumerate(deltas):
            yield {
                "index": index,
                "delta": each,
                "finish_reason": piece.finish if at == len(deltas) - 1 else None,
                "logprobs": self._logprobs(piece.scores) if piece.scores and not at else None,
            }

    def call_id(self, prefix: str = "call_") -> str:
        return call_id(self.model, prefix)

    def opening(self, chunks: Chunks) -> list[bytes]:
        """As in OpenAI's API, the first chunk of each choice has the role."""
        delta = {"role": "assistant", "content": ""}
        first = {"delta": delta, "finish_reason": None, "logprobs": None}
        return [chunks.choice({"index": i, **first}) for i in range(len(chunks.totals))]
