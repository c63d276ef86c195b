"""The public port's routes: validation, admission, generation, errors; anything else is a 404."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from contextlib import ExitStack, nullcontext
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from kvline_server.http.body import parse_object, read_json
from kvline_server.http.chat import Chat
from kvline_server.http.completions import Completion
from kvline_server.http.errors import ApiError, EngineFailed, NotAllowed, NotFound
from kvline_server.http.models import card
from kvline_server.http.protocol.chat import ChatRequest
from kvline_server.http.protocol.completions import CompletionRequest
from kvline_server.http.protocol.generation import GenerationRequest
from kvline_server.http.protocol.strict import parse
from kvline_server.http.request_id import request_id
from kvline_server.http.scores import held
from kvline_server.http.sending import respond
from kvline_server.http.served import check_served
from kvline_server.http.service import VERSION, Service
from kvline_server.http.stream import Jobs, api_error, events
from kvline_server.http.tokenize import detokenize, tokenize

T = TypeVar("T")


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

    @app.api_route("/ping", methods=["GET", "POST"])
    async def ping() -> JSONResponse:
        service.admission.check_open()
        return JSONResponse({})

    @app.get("/version")
    async def version() -> JSONResponse:
        return JSONResponse({"version": VERSION})

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        service.admission.check_sized()  # its context is not known before
        return JSONResponse({"object": "list", "data": [card(service)]})

    @app.get("/v1/models/{name:path}")  # names may hold slashes
    async def model(name: str) -> JSONResponse:
        service.admission.check_sized()
        service.check_model(name)
        return JSONResponse(card(service))

    @app.post("/tokenize")
    async def tokens(request: Request) -> Response:
        return await tokenize(service, request)

    @app.post("/detokenize")
    async def text(request: Request) -> Response:
        return await detokenize(service, request)

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
    route: type[Any],
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
                service.check_model(parsed.model)
                check_served(parsed)
                id = request_id(request.headers.get("x-request-id"), route.id_prefix)
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
        return await respond(lambda: work.response(answers), stack, headers)


def _wanted(jobs: Jobs) -> tuple[int, int]:
    """Prompt tokens, and bytes of the prompts' scores. Those of output tokens are counted as they
    come: most answers end long before max_tokens."""
    nbytes = sum(
        held(len(prompt), params.prompt_logprobs)
        for prompt, params in jobs
        if params.prompt_logprobs is not None
    )
    return sum(len(prompt) for prompt, _ in jobs), nbytes


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
        "/v1/models/NAME, /tokenize, /detokenize, /version, /health and /ping",
        code="unknown_url",
    ).response()


async def _gone(request: Request, error: Exception) -> Response:
    """The client has left, so nobody reads this; it is not logged as an error."""
    return Response(status_code=499)


async def _unexpected(request: Request, error: Exception) -> Response:
    return EngineFailed("the request failed inside the server").response()
