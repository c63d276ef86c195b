"""Fields that answers of both routes share, whole or as chunks of a stream, and `usage`."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import msgspec

from kvline_server.formats.events import CallArguments, Event, Reasoning, Text
from kvline_server.http.errors import ApiError
from kvline_server.http.generate import Generator, RequestLimits
from kvline_server.http.later import encode
from kvline_server.http.pieces import Answer, Piece
from kvline_server.http.protocol.generation import GenerationRequest, StreamOptions
from kvline_server.http.reading import Reading
from kvline_server.ipc.sampling_params import SamplingParams

if TYPE_CHECKING:
    from kvline_server.http.image_store import Held

Request = TypeVar("Request", bound=GenerationRequest)
NO_OPTIONS = StreamOptions()
LINE_BREAKS = [(c.encode(), b"\\u%04x" % ord(c)) for c in "\x85\u2028\u2029"]
MARK, ENCODED_MARK = "\0", b'"\\u0000"'  # stands for a text
_encode_text = msgspec.json.Encoder().encode


@dataclass(eq=False)
class Route(ABC, Generic[Request]):
    """A request of one of the routes, and the JSON of its answers."""

    chunk_kind: ClassVar[str]
    id_prefix: ClassVar[str]

    id: str
    request: Request
    generator: Generator
    limits: RequestLimits
    arrived: float  # when the request had come, by time.monotonic
    created: int = field(init=False, default_factory=lambda: int(time.time()))
    prompts: list[list[int]] = field(init=False, default_factory=list)
    reading: Reading | None = field(init=False, default=None)  # None: answers are text
    images: Held | None = field(init=False, default=None)
    image_tokens: int = field(init=False, default=0)  # of the prompt

    @property
    def held(self) -> int:
        """Bytes that are kept of the request until it is answered, beside its prompts."""
        return 0 if self.reading is None else self.reading.held

    def opening(self, chunks: Chunks) -> list[bytes]:
        """Chunks before those of any choice."""
        return []

    def echo(self, index: int, prompt: list[int], first: Piece) -> Iterable[dict[str, Any]]:
        """The echoed prompt as choices of chunks, before `first`, which has the prompt's scores."""
        return ()

    @abstractmethod
    def parts(self, index: int, piece: Piece) -> Iterable[dict[str, Any]]:
        """The piece as choices, each of a chunk."""

    async def events(
        self, index: int, prompt: list[int], params: SamplingParams, chunks: Chunks
    ) -> AsyncGenerator[bytes, None]:
        """Server-sent chunks of one choice; adds its usage to `chunks.totals`."""
        stops, first = self.request.stops(), True
        given = stops, self.arrived, self.reading, self.images
        pieces = self.generator.follow(prompt, params, *given)
        async with aclosing(pieces):
            async for piece in pieces:
                chunks.totals[index].count(piece)
                if first:
                    for choice in self.echo(index, prompt, piece):
                        yield chunks.choice(choice)
                    first = False
                if not piece.goes_on:
                    for choice in self.parts(index, piece):
                        yield chunks.choice(choice)
                elif piece.events:
                    for event in piece.events:
                        if chunk := chunks.event(index, event):
                            yield chunk
                elif piece.text:
                    yield chunks.text(index, piece.text)


def whole(
    work: Route[Any], kind: str, choices: list[dict[str, Any]], answers: list[Answer]
) -> dict[str, Any]:
    used = usage(work.prompts, answers, work.image_tokens)
    return {**_fields(work, kind, choices), "usage": used}


class Chunks:
    """The chunks of one request's stream, as events. What all of them have in common is encoded
    once; for a chunk with nothing but text only the text is.

    With include_usage each chunk has `usage`: null except in the last one; with
    continuous_usage_stats, the usage so far in each."""

    def __init__(self, work: Route[Any], totals: list[Answer]) -> None:
        options = work.request.stream_options or NO_OPTIONS
        self.totals = totals
        self._work = work
        fields = msgspec.json.encode(_fields(work, work.chunk_kind, []))
        self._head = b"data: " + escaped(fields[:-2])  # without the end of the list of choices
        self._tail = b'],"usage":null}\n\n' if options.include_usage else b"]}\n\n"
        self._counts = options.continuous_usage_stats
        self._around: dict[int, list[bytes]] = {}  # the text of a choice
        self._around_events: dict[tuple[int, int | None], list[bytes]] = {}  # of a choice's call

    def choice(self, choice: dict[str, Any]) -> bytes:
        tail = self._usage() if self._counts else self._tail
        return self._head + escaped(b"".join(encode(choice))) + tail

    def text(self, index: int, text: str) -> bytes:
        """Of a choice that goes on, without logprobs."""
        around = self._around.get(index)
        if around is None:
            around = self._around[index] = self._surroundings(index, Text(MARK))
        chunk = escaped(_encode_text(text)).join(around)
        return chunk + self._usage() if self._counts else chunk

    def event(self, index: int, event: Event) -> bytes:
        """Likewise; nothing for one that a stream does not show."""
        if isinstance(event, Text):
            return self.text(index, event.text)
        if not isinstance(event, Reasoning | CallArguments):
            return b"".join(map(self.choice, self._work.parts(index, _piece(event))))
        call = event.index if isinstance(event, CallArguments) else None
        around = self._around_events.get((index, call))
        if around is None:
            marked = Reasoning(MARK) if call is None else CallArguments(call, MARK)
            around = self._around_events[index, call] = self._surroundings(index, marked)
        chunk = escaped(_encode_text(event.text)).join(around)
        return chunk + self._usage() if self._counts else chunk

    def _surroundings(self, index: int, marked: Event) -> list[bytes]:
        """Of the places of an event's text in its chunk, which may be several."""
        [choice] = self._work.parts(index, _piece(marked))
        around = escaped(b"".join(encode(choice))).split(ENCODED_MARK)
        around[0] = self._head + around[0]
        around[-1] += b"" if self._counts else self._tail
        return around

    def last(self) -> bytes:
        return self._head + self._usage()

    def _usage(self) -> bytes:
        counted = usage(self._work.prompts, self.totals, self._work.image_tokens)
        return b'],"usage":' + msgspec.json.encode(counted) + b"}\n\n"


def _piece(event: Event) -> Piece:
    made = Piece()
    made.write(event)
    return made


def error_event(error: ApiError) -> bytes:
    return b"data: " + escaped(msgspec.json.encode(error.body())) + b"\n\n"


def escaped(data: bytes) -> bytes:
    """Escapes Unicode line breaks: some clients would split the event at them."""
    if not data.isascii():
        for raw, escaped in LINE_BREAKS:
            data = data.replace(raw, escaped)
    return data


def _fields(work: Route[Any], kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    """In OpenAI's order."""
    return {
        "id": work.id,
        "object": kind,
        "created": work.created,
        "model": work.limits.served_name,
        "system_fingerprint": work.limits.fingerprint,
        "choices": choices,
    }


def usage(prompts: list[list[int]], answers: list[Answer], image_tokens: int = 0) -> dict[str, Any]:
    """A prompt counts once, however many choices it has. Its cached tokens count once too: the
    fewest of its choices, so tokens that no choice had to compute."""
    n = len(answers) // len(prompts)
    prompt = sum(len(p) for p in prompts)
    output = sum(a.tokens for a in answers)
    cached = sum(min(a.cached for a in answers[i : i + n]) for i in range(0, len(answers), n))
    of_images = {"image_tokens": image_tokens} if image_tokens else {}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached, **of_images},
        "completion_tokens_details": {"reasoning_tokens": sum(a.reasoning for a in answers)},
    }
