"""Other APIs than OpenAI's chat, as translations to it and back: one choice, answered whole or as
the events of that API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import ExitStack, aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from kvline_server.http.admission import Room
from kvline_server.http.chat import Chat
from kvline_server.http.envelope import escaped
from kvline_server.http.errors import ApiError
from kvline_server.http.fields import Field
from kvline_server.http.pieces import Answer, Piece
from kvline_server.http.planning import plan
from kvline_server.http.protocol.chat import ChatRequest
from kvline_server.http.reading import takes_budget
from kvline_server.http.sending import respond, unless_gone
from kvline_server.http.service import Service
from kvline_server.http.stream import Jobs, api_error

SENT_COPIES = 4  # of a kept text while it is sent: itself, encoded, as an event, in its connection
Object = dict[str, Any]
Sent = tuple[str, Object]  # an event's name and its data


@dataclass(frozen=True, slots=True)
class Used:
    """Tokens of a request so far."""

    prompt: int
    cached: int = 0  # of the prompt
    output: int = 0
    reasoning: int = 0  # of the output
    images: int = 0  # of the prompt


class Translation(Protocol):
    """One request of another API: what it means, and how it is answered."""

    id_prefix: ClassVar[str]
    field: Field  # its own one, by the chat's; once the request is read

    def read(self, value: Object) -> ChatRequest:
        """Raises BadRequest with that API's field."""
        ...

    def begin(self, work: Chat) -> Iterable[Sent]: ...

    def write(self, piece: Piece, used: Used) -> Iterable[Sent]: ...

    def end(self, used: Used) -> Iterable[Sent]: ...

    def fail(self, error: ApiError) -> Iterable[Sent]: ...

    def answer(self) -> Object:
        """The whole one, after `end`."""
        ...

    def kept(self) -> int:
        """Bytes that it takes: what waits for the end, with its copies then."""
        ...


async def translated(service: Service, request: Request, made: Translation) -> Response:
    with ExitStack() as stack:
        names = made.id_prefix, lambda name: made.field(name)
        read = partial(_read, service, made)
        work, jobs, room = await plan(service, request, stack, Chat, read, *names)
        room.hold(work.held)
        headers = {"x-request-id": work.id, "request-id": work.id}
        if work.request.stream:
            stream = _stream(work, jobs, made, room, stack.pop_all())
            return StreamingResponse(stream, media_type="text/event-stream", headers=headers)

        async def whole() -> None:
            for _ in made.begin(work):
                pass
            async for sent in _pieces(work, jobs, made, room):
                for _ in sent:
                    pass

        await unless_gone(request, whole())
        return await respond(made.answer, stack, headers)


def _read(service: Service, made: Translation, value: Object) -> ChatRequest:
    """Without a budget of reasoning that nothing could end by: in these APIs it is advice, which
    clients send to every model."""
    request, chat = made.read(value), service.generator.chat
    if chat is not None and not takes_budget(chat.answering):
        request.thinking_token_budget = None
    return request


async def _pieces(
    work: Chat, jobs: Jobs, made: Translation, room: Room
) -> AsyncGenerator[Iterable[Sent], None]:
    [(prompt, params)] = jobs
    total, stops = Answer(), work.request.stops()
    pieces = work.generator.follow(prompt, params, stops, work.arrived, work.reading, work.images)
    async with aclosing(pieces):
        async for piece in pieces:
            total.count(piece)
            yield made.write(piece, _used(work, prompt, total))
            room.keep(made.kept())
    yield made.end(_used(work, prompt, total))


def _used(work: Chat, prompt: list[int], total: Answer) -> Used:
    return Used(len(prompt), total.cached, total.tokens, total.reasoning, work.image_tokens)


async def _stream(
    work: Chat, jobs: Jobs, made: Translation, room: Room, holding: ExitStack
) -> AsyncGenerator[bytes, None]:
    """As stream.events: an error becomes an event, because the status line has been sent."""
    with suppress(ApiError), holding:
        for event in made.begin(work):
            yield _encoded(event)
        try:
            async with aclosing(_pieces(work, jobs, made, room)) as pieces:
                async for sent in pieces:
                    for event in sent:
                        yield _encoded(event)
        except Exception as failure:
            error = api_error(failure)
            for event in made.fail(error):
                yield _encoded(event)
            if error is failure:
                raise
            raise error from failure


def _encoded(sent: Sent) -> bytes:
    name, data = sent
    return f"event: {name}\ndata: ".encode() + escaped(msgspec.json.encode(data)) + b"\n\n"
