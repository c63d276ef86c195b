"""The public port's routes: validation, admission, generation, errors; anything else is a 404."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from kvline_server.http import error_forms
from kvline_server.http.anthropic import Messages
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
from kvline_server.http.tokenize import count_tokens, detokenize, tokenize
from kvline_server.http.translated import translated


def create_app(service: Service) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _unexpected)
    _add_answers(app, service)
    _add_tokens(app, service)
    _add_descriptions(app, service)
    return app


def _add_answers(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _generate(service, request, CompletionRequest, Completion)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _generate(service, request, ChatRequest, Chat)

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        return await translated(service, request, Responses())

    @app.post("/v1/messages")
    async def messages(request: Request) -> Response:
        return await translated(service, request, Messages())


def _add_tokens(app: FastAPI, service: Service) -> None:
    @app.post("/v1/messages/count_tokens")
    async def count(request: Request) -> Response:
        return await count_tokens(service, request)

    @app.post("/tokenize")
    async def ids(request: Request) -> Response:
        return await tokenize(service, request)

    @app.post("/detokenize")
    async def text(request: Request) -> Response:
        return await detokenize(service, request)


def _add_descriptions(app: FastAPI, service: Service) -> None:
    """What other programs ask to know whom they talk to."""

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


async def _generate(
    service: Service,
    request: Request,
    kind: type[GenerationRequest],
    route: type[Any],
) -> Response:
    with ExitStack() as stack:
        read = partial(parse, kind)
        work, jobs, room = await plan(service, request, stack, route, read, route.id_prefix)
        room.hold(work.held)
        headers = {"x-request-id": work.id}
        if work.request.stream:
            stream = events(work, jobs, stack.pop_all())
            return StreamingResponse(stream, media_type="text/event-stream", headers=headers)
        stops = work.request.stops()
        answers = await unless_gone(
            request,
            service.generator.answers(jobs, stops, work.arrived, room, work.reading, work.images),
        )
        return await respond(lambda: work.response(answers), stack, headers)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_forms.response(error, request.url.path)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        wrong = NotAllowed("this route does not take that method")
        response = error_forms.response(wrong, request.url.path)
        response.headers.update(error.headers or {})
        return response
    missing = NotFound(
        "no such route; this port serves /v1/completions, /v1/chat/completions, /v1/responses, "
        "/v1/messages, /v1/messages/count_tokens, "
        "/v1/models, /v1/models/NAME, /tokenize, /detokenize, /version, /health and /ping",
        code="unknown_url",
    )
    return error_forms.response(missing, request.url.path)


async def _gone(request: Request, error: Exception) -> Response:
    """The client has left, so nobody reads this; it is not logged as an error."""
    return Response(status_code=499)


async def _unexpected(request: Request, error: Exception) -> Response:
    failed = EngineFailed("the request failed inside the server")
    return error_forms.response(failed, request.url.path)
