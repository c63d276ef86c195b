"""/tokenize and /detokenize: the model's tokenizer, for clients that count or cut; and Anthropic's
count of a conversation's tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from starlette.requests import Request
from starlette.responses import Response

from kvline_server.http import image_parts
from kvline_server.http.anthropic_request import to_chat
from kvline_server.http.body import parse_object, read_json
from kvline_server.http.conversation import asked, rendered
from kvline_server.http.errors import BadRequest
from kvline_server.http.fields import Field, named
from kvline_server.http.later import Later
from kvline_server.http.protocol.anthropic import CountTokensRequest
from kvline_server.http.protocol.chat import Conversation
from kvline_server.http.protocol.strict import parse
from kvline_server.http.protocol.tokenize import Detokenize, TokenizeChat, TokenizeText
from kvline_server.http.sending import respond
from kvline_server.http.service import Service
from kvline_server.http.tokens import Tokens

AT_ONCE = 1024  # ids or strings that are Python objects
IN_JSON = 6  # bytes that a byte of a text may take, as \u0000
Ids = npt.NDArray[np.int32]
Read = TypeVar("Read", bound=Conversation)


async def tokenize(service: Service, request: Request) -> Response:
    def read(value: dict[str, Any]) -> TokenizeChat:
        body = parse(TokenizeChat, value)
        _check_model(service, body.model)
        return body

    with ExitStack() as stack:
        raw = await _received(service, request, stack)
        made: tuple[TokenizeText | TokenizeChat, Ids] | None = await _of_text(service, raw)
        body, ids = made or await _of_chat(service, raw, read)
        stack.enter_context(service.admission.room(0, 0, ids.nbytes))
        strings = body.return_token_strs
        return await respond(lambda: _answer(service, ids, strings), stack)


async def count_tokens(service: Service, request: Request) -> Response:
    """Anthropic's."""
    field: Field = str

    def read(value: dict[str, Any]) -> Conversation:
        body = parse(CountTokensRequest, value)
        service.check_model(body.model)
        nonlocal field
        chat, fields = to_chat(body)
        field = fields.of
        return chat

    with ExitStack() as stack:
        raw = await _received(service, request, stack)
        with named(lambda name: field(name)):
            _, ids = await _of_chat(service, raw, read)
        return await respond(lambda: {"input_tokens": len(ids)}, stack)


async def _received(service: Service, request: Request, stack: ExitStack) -> bytearray:
    stack.enter_context(service.admission.request())
    body = stack.enter_context(service.bodies.hold())
    return await read_json(request, body, service.largest_chat)


async def _of_text(service: Service, raw: bytearray) -> tuple[TokenizeText, Ids] | None:
    """None where it is a chat: what is parsed of that does not wait for a process that renders, as
    it takes many times the body's size."""
    async with service.bodies.turn(len(raw)):
        value = parse_object(raw)
        if "messages" in value:
            return None
        body = parse(TokenizeText, value)
        _check_model(service, body.model)
        return body, await asyncio.to_thread(_encoded, service, body)


async def _of_chat(
    service: Service, raw: bytearray, read: Callable[[dict[str, Any]], Read]
) -> tuple[Read, Ids]:
    """The request as `read`, and its tokens."""
    async with service.rendering:
        turn = service.bodies.turn(len(raw))
        async with turn:
            body = read(parse_object(raw))
        make = await asyncio.to_thread(_prepared, service, body)
        async with turn:
            return body, await asyncio.to_thread(make)


async def detokenize(service: Service, request: Request) -> Response:
    with ExitStack() as stack:
        raw = await _received(service, request, stack)
        async with service.bodies.turn(len(raw)):
            body = parse(Detokenize, parse_object(raw))
            del raw
            _check_model(service, body.model)
            tokens = _check_ids(service, body.tokens)
            most = IN_JSON * await asyncio.to_thread(tokens.text_bytes, body.tokens)
            if most > service.admission.max_held:
                message = f"tokens: their text may take {most} bytes; this server holds "
                raise BadRequest(f"{message}{service.admission.max_held}: send fewer", "tokens")
            with service.admission.room(0, 0, most):
                text, nbytes = await asyncio.to_thread(_decoded, tokens, body.tokens)
        stack.enter_context(service.admission.room(0, 0, nbytes))
        return await respond(lambda: {"prompt": text}, stack)


def _check_model(service: Service, name: str | None) -> None:
    if name is not None:
        service.check_model(name)


def _tokens(service: Service) -> Tokens:
    if service.generator.tokens is None:
        raise BadRequest("this model has no tokenizer")
    return service.generator.tokens


def _encoded(service: Service, body: TokenizeText) -> Ids:
    most = service.limits.max_model_len
    return np.array(_tokens(service).encode(body.prompt, most, body.add_special_tokens), np.int32)


def _decoded(tokens: Tokens, ids: list[int]) -> tuple[str, int]:
    """Their text, and its bytes in JSON."""
    text = tokens.decode(ids)
    return text, len(msgspec.json.encode(text))


def _prepared(service: Service, body: Conversation) -> Callable[[], Ids]:
    """Renders a chat, which may take long and takes no turn. -> what tokenises"""
    most, chat = service.limits.max_model_len, service.generator.chat
    if chat is None:
        raise BadRequest("this model has no tokenizer")
    images = service.generator.images
    files = image_parts.read(body.messages, images)
    with image_parts.written(files):
        made = chat.render(rendered(body.messages), asked(body))

    def tokenised() -> Ids:
        if files and images is not None:
            with image_parts.written(files):
                return np.array(images.tokenise(chat, made, most, files)[0], np.int32)
        return np.array(chat.tokenise(made, most), np.int32)

    return tokenised


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
