"""The public port's routes: validation, admission, generation, errors; anything else is a 404."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from kvline_server.http.chat import Chat
from kvline_server.http.completions import Completion
from kvline_server.http.errors import ApiError, EngineFailed, NotAllowed, NotFound
from kvline_server.http.models import card
from kvline_server.http.planning import plan
from kvline_server.http.protocol.chat import ChatRequest
from kvline_server.http.protocol.completions import CompletionRequest
from kvline_server.http.protocol.generation import GenerationRequest
from kvline_server.http.protocol.strict import parse
from kvline_server.http.responses import Responses
from kvline_server.http.sending import respond, unless_gone
from kvline_server.http.service import VERSION, Service
from kvline_server.http.stream import events
from kvline_server.http.tokenize import detokenize, tokenize
from kvline_server.http.translated import translated


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

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        return await translated(service, request, Responses())

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
        read = partial(parse, kind)
        work, jobs, room = await plan(service, request, stack, route, read, route.id_prefix)
        headers = {"x-request-id": work.id}
        if work.request.stream:
            stream = events(work, jobs, stack.pop_all())
            return StreamingResponse(stream, media_type="text/event-stream", headers=headers)
        stops = work.request.stops()
        answers = await unless_gone(
            request, service.generator.answers(jobs, stops, work.arrived, room)
        )
        return await respond(lambda: work.response(answers), stack, headers)


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
        "no such route; this port serves /v1/completions, /v1/chat/completions, /v1/responses, "
        "/v1/models, /v1/models/NAME, /tokenize, /detokenize, /version, /health and /ping",
        code="unknown_url",
    ).response()


async def _gone(request: Request, error: Exception) -> Response:
    """The client has left, so nobody reads this; it is not logged as an error."""
    return Response(status_code=499)


async def _unexpected(request: Request, error: Exception) -> Response:
    return EngineFailed("the request failed inside the server").response()
