"""/tokenize and /detokenize: the model's tokenizer, for clients that count or cut; and Anthropic's
count of a conversation's tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.responses import Response

from kvline_server.http.anthropic_request import to_chat
from kvline_server.http.body import parse_object, read_json
from kvline_server.http.conversation import asked, rendered
from kvline_server.http.errors import BadRequest
from kvline_server.http.later import Later
from kvline_server.http.protocol.anthropic import CountTokensRequest
from kvline_server.http.protocol.chat import Conversation
from kvline_server.http.protocol.strict import parse
from kvline_server.http.protocol.tokenize import Detokenize, TokenizeChat, TokenizeText
from kvline_server.http.sending import respond
from kvline_server.http.service import Service
from kvline_server.http.tokens import Tokens

AT_ONCE = 1024  # ids or strings that are Python objects
Ids = npt.NDArray[np.int32]
Body = TokenizeText | Conversation


async def tokenize(service: Service, request: Request) -> Response:
    with ExitStack() as stack:
        body, ids = await _ids(service, request, stack, partial(_read, service))
        stack.enter_context(service.admission.room(0, 0, ids.nbytes))
        assert isinstance(body, TokenizeText | TokenizeChat)
        strings = body.return_token_strs
        return await respond(lambda: _answer(service, ids, strings), stack)


async def count_tokens(service: Service, request: Request) -> Response:
    """Anthropic's."""

    def read(value: dict[str, Any]) -> Conversation:
        body = parse(CountTokensRequest, value)
        service.check_model(body.model)
        return to_chat(body)[0]

    with ExitStack() as stack:
        _, ids = await _ids(service, request, stack, read)
        return await respond(lambda: {"input_tokens": len(ids)}, stack)


async def _ids(
    service: Service, request: Request, stack: ExitStack, read: Callable[[dict[str, Any]], Body]
) -> tuple[Body, Ids]:
    """The request as `read`, and its tokens."""
    stack.enter_context(service.admission.request())
    raw = await read_json(request, stack.enter_context(service.bodies.hold()))
    async with service.rendering:
        turn = service.bodies.turn(len(raw))
        async with turn:
            body = read(parse_object(raw))
            del raw
        make = await asyncio.to_thread(_prepared, service, body)
        async with turn:
            return body, await asyncio.to_thread(make)


async def detokenize(service: Service, request: Request) -> Response:
    with ExitStack() as stack:
        stack.enter_context(service.admission.request())
        raw = await read_json(request, stack.enter_context(service.bodies.hold()))
        async with service.bodies.turn(len(raw)):
            body = parse(Detokenize, parse_object(raw))
            del raw
            _check_model(service, body.model)
            tokens = _check_ids(service, body.tokens)
            text = await asyncio.to_thread(tokens.decode, body.tokens)
        stack.enter_context(service.admission.room(0, 0, len(msgspec.json.encode(text))))
        return await respond(lambda: {"prompt": text}, stack)


def _read(service: Service, value: dict[str, Any]) -> TokenizeText | TokenizeChat:
    body: TokenizeText | TokenizeChat
    body = parse(TokenizeChat, value) if "messages" in value else parse(TokenizeText, value)
    _check_model(service, body.model)
    return body


def _check_model(service: Service, name: str | None) -> None:
    if name is not None:
        service.check_model(name)


def _tokens(service: Service) -> Tokens:
    if service.generator.tokens is None:
        raise BadRequest("this model has no tokenizer")
    return service.generator.tokens


def _prepared(service: Service, body: Body) -> Callable[[], Ids]:
    """Renders a chat, which may take long and takes no turn. -> what tokenises"""
    tokens, most = _tokens(service), service.limits.max_model_len
    if isinstance(body, TokenizeText):
        text, special = body.prompt, body.add_special_tokens
        return lambda: np.array(tokens.encode(text, most, special), np.int32)
    chat = service.generator.chat
    assert chat is not None  # as there is a tokenizer
    made = chat.render(rendered(body.messages), asked(body))
    return lambda: np.array(chat.tokenise(made, most), np.int32)


def _check_ids(service: Service, ids: list[int]) -> Tokens:
    """The text of so many tokens as the context has is bounded; others are no answer of this
    model."""
    limits = service.limits
    if len(ids) > limits.max_model_len:
        raise BadRequest(
            f"tokens: {len(ids)} of them, the context is {limits.max_model_len}", "tokens"
        )
    if ids and max(ids) >= limits.vocabulary:
        raise BadRequest(f"tokens: token ids are below {limits.vocabulary}", "tokens")
    return _tokens(service)


def _answer(service: Service, ids: Ids, strings: bool) -> dict[str, Any]:
    """In vLLM's order; strings as the vocabulary has them."""
    name = _tokens(service).tokenizer.id_to_token
    return {
        "count": len(ids),
        "max_model_len": service.limits.max_model_len,
        "tokens": Later(lambda: map(int, ids), AT_ONCE),
        "token_strs": Later(lambda: map(name, map(int, ids)), AT_ONCE) if strings else None,
    }
