"""The public port's routes: validation, admission, generation, errors; anything else is a 404."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from kvline_server.http.admission import Admission
from kvline_server.http.body import Bodies, parse_object, read_json
from kvline_server.http.chat import Chat
from kvline_server.http.completions import Completion
from kvline_server.http.errors import ApiError, EngineFailed, NotAllowed, NotFound
from kvline_server.http.generate import Generator, RequestLimits
from kvline_server.http.later import encode
from kvline_server.http.protocol.chat import ChatRequest
from kvline_server.http.protocol.completions import CompletionRequest
from kvline_server.http.protocol.generation import GenerationRequest
from kvline_server.http.protocol.strict import parse
from kvline_server.http.request_id import request_id
from kvline_server.http.scores import held
from kvline_server.http.served import check_served
from kvline_server.http.stream import Jobs, api_error, events

T = TypeVar("T")


@dataclass(slots=True)
class Service:
    """What the routes share."""

    generator: Generator
    admission: Admission
    bodies: Bodies
    limits: RequestLimits
    started: int = field(default_factory=lambda: int(time.time()))
    rendering: asyncio.Semaphore = field(init=False)  # as many chats as processes render

    def __post_init__(self) -> None:
        chat = self.generator.chat
        self.rendering = asyncio.Semaphore(chat.processes if chat is not None else 1)


def create_app(service: Service) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _unexpected)

    @app.get("/health")
    async def health() -> JSONResponse:
        service.admission.check_open()
        return JSONResponse({"status": "ok"})

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        service.admission.check_sized()  # its context is not known before
        return JSONResponse({"object": "list", "data": [_model(service)]})

    @app.get("/v1/models/{name:path}")  # names may hold slashes
    async def model(name: str) -> JSONResponse:
        service.admission.check_sized()
        _check_model(name, service.limits)
        return JSONResponse(_model(service))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _generate(service, request, CompletionRequest, Completion)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _generate(service, request, ChatRequest, Chat)

    return app


async def _generate(
    service: Service,
    request: Request,
    kind: type[GenerationRequest],
    route: Callable[..., Any],
) -> Response:
    with ExitStack() as stack:
        stack.enter_context(
            service.generator.traces.request(f"POST {request.url.path}", request.headers)
        )
        stack.enter_context(service.admission.request())
        raw = await read_json(request, stack.enter_context(service.bodies.hold()))
        arrived = time.monotonic()
        async with service.rendering if route is Chat else nullcontext():
            turn = service.bodies.turn(len(raw))
            async with turn:
                parsed = parse(kind, parse_object(raw))
                del raw
                _check_model(parsed.model, service.limits)
                check_served(parsed)
                id = request_id(request.headers.get("x-request-id"))
                work = route(id, parsed, service.generator, service.limits, arrived)
                if route is not Chat:
                    jobs = await asyncio.to_thread(work.plan)
            if route is Chat:
                # Without a turn: a template may take long, and completions need none.
                await asyncio.to_thread(work.render)
                async with turn:
                    jobs = await asyncio.to_thread(work.plan)
        room = stack.enter_context(service.admission.room(len(jobs), *_wanted(jobs)))
        headers = {"x-request-id": id}
        if parsed.stream:
            stream = events(work, jobs, stack.pop_all())
            return StreamingResponse(stream, media_type="text/event-stream", headers=headers)
        answers = await _unless_gone(
            request, service.generator.answers(jobs, parsed.stops(), arrived, room)
        )
        pieces = await asyncio.to_thread(lambda: encode(work.response(answers)))
        whole = await asyncio.to_thread(next, pieces)
        if (more := next(pieces, None)) is None:
            return Response(whole, media_type="application/json", headers=headers)
        body = _sent(itertools.chain((whole, more), pieces), stack.pop_all())
        return StreamingResponse(body, media_type="application/json", headers=headers)


def _wanted(jobs: Jobs) -> tuple[int, int]:
    """Prompt tokens, and bytes of the prompts' scores. Those of output tokens are counted as they
    come: most answers end long before max_tokens."""
    nbytes = sum(
        held(len(prompt), params.prompt_logprobs)
        for prompt, params in jobs
        if params.prompt_logprobs is not None
    )
    return sum(len(prompt) for prompt, _ in jobs), nbytes


async def _sent(pieces: Iterator[bytes], holding: ExitStack) -> AsyncGenerator[bytes, None]:
    """An answer that is encoded while it is sent, off the event loop."""
    with holding:
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield piece


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.limits.served_name,
        "object": "model",
        "created": service.started,
        "owned_by": "kvline",
        "max_model_len": service.limits.max_model_len,
    }


def _check_model(name: str, limits: RequestLimits) -> None:
    if name != limits.served_name:
        raise NotFound(
            f"model: this server serves {limits.served_name!r}", "model", "model_not_found"
        )


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, cancelled when the client leaves first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return await task
    except ExceptionGroup as group:
        raise api_error(group) from group
    finally:
        gone.cancel()
        task.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        response = NotAllowed("this route does not take that method").response()
        response.headers.update(error.headers or {})
        return response
    return NotFound(
        "no such route; this port serves /v1/completions, /v1/chat/completions, /v1/models, "
        "/v1/models/NAME and /health",
        code="unknown_url",
    ).response()


async def _gone(request: Request, error: Exception) -> Response:
    """The client has left, so nobody reads this; it is not logged as an error."""
    return Response(status_code=499)


async def _unexpected(request: Request, error: Exception) -> Response:
    return EngineFailed("the request failed inside the server").response()
