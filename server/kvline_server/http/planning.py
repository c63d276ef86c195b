"""From a request's bytes to the sequences that it asks for, each part in its turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import msgspec
from starlette.requests import Request

from kvline_server.http.admission import Room
from kvline_server.http.body import MAX_BODY_BYTES, Body, parse_object, read_json
from kvline_server.http.chat import Chat
from kvline_server.http.completions import Completion
from kvline_server.http.envelope import Route
from kvline_server.http.fields import Field, named
from kvline_server.http.generate import RequestLimits
from kvline_server.http.guarantee import Guarantee, compiled, demanded, guaranteed
from kvline_server.http.protocol.generation import GenerationRequest
from kvline_server.http.request_id import request_id
from kvline_server.http.scores import held
from kvline_server.http.sending import unless_gone
from kvline_server.http.service import Service
from kvline_server.http.stream import Jobs

Read = Callable[[dict[str, Any]], GenerationRequest]  # raises BadRequest


async def plan(
    service: Service,
    request: Request,
    stack: ExitStack,
    route: type[Any],
    read: Read,
    id_prefix: str,
    field: Field = str,
) -> tuple[Any, Jobs, Room]:
    """`stack` holds what the request holds until it is answered; `field` is what its client calls a
    field of what was read. -> the route's work, its jobs and their room"""
    stack.enter_context(
        service.generator.traces.request(f"POST {request.url.path}", request.headers)
    )
    stack.enter_context(service.admission.request())
    renders, body = issubclass(route, Chat), stack.enter_context(service.bodies.hold())
    raw = await read_json(request, body, service.largest_chat if renders else MAX_BODY_BYTES)
    arrived = time.monotonic()
    async with service.rendering if renders else nullcontext():
        turn = service.bodies.turn(len(raw))
        async with turn:
            given = parse_object(raw)
            del raw
            if isinstance(name := given.get("model"), str):
                service.check_model(name)  # first: clients send what only that model takes
            parsed = read(given)
            del given
            id = request_id(request.headers.get("x-request-id"), id_prefix)
            work = route(id, parsed, service.generator, service.limits, arrived)
            if not renders:
                guarantee, jobs = await asyncio.to_thread(_unrendered, work)
        if renders:
            with named(field):
                # Without a turn: a template may take long, and completions need none.
                guarantee = await asyncio.to_thread(_guarantee, work)
                async with turn:
                    jobs = await asyncio.to_thread(work.plan)
    with named(field):
        room = stack.enter_context(
            service.admission.room(len(jobs), *_wanted(jobs, service.limits))
        )
        if guarantee is not None:
            # Within its room, which bounds the prompts of requests that wait for a grammar.
            waits = compiled(service.compiler, guarantee)
            key = stack.enter_context(await unless_gone(request, waits))
            jobs = [(prompt, msgspec.structs.replace(made, grammar=key)) for prompt, made in jobs]
        if isinstance(work, Chat) and work.files:
            await _decode(service, request, stack, work, body)
    return work, jobs, room


async def _decode(
    service: Service, request: Request, stack: ExitStack, work: Chat, body: Body
) -> None:
    """Has the images of an admitted request decoded; its files are no longer kept."""
    assert service.generator.images is not None
    held = stack.enter_context(service.generator.images.store.request())
    await unless_gone(request, held.place(work.files, work.placed))
    body.give(sum(file.url_bytes for file in work.files))
    work.files, work.images = (), held


def _guarantee(work: Route[Any]) -> Guarantee | None:
    """And renders what is rendered: from then on the request has no tools. Raises BadRequest."""
    demand = demanded(work.request, work.generator)
    prompt = work.render()[0] if isinstance(work, Chat) else ""
    return None if demand is None else guaranteed(demand, work.generator.tokens, prompt)


def _unrendered(work: Completion) -> tuple[Guarantee | None, Jobs]:
    return _guarantee(work), work.plan()


def _wanted(jobs: Jobs, limits: RequestLimits) -> tuple[int, int]:
    """KV tokens of the prompts, and bytes of the prompts' scores. Those of output tokens are
    counted as they come: most answers end long before max_tokens."""
    nbytes = sum(
        held(len(prompt), params.prompt_logprobs)
        for prompt, params in jobs
        if params.prompt_logprobs is not None
    )
    return sum(limits.kv_tokens(prompt) for prompt, _ in jobs), nbytes
