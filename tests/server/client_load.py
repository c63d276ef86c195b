"""Clients that take all that the CPU's limits give them, and what the HTTP process holds for them.

The real application and connections over socket pairs; only the engine is scripted: it answers at
once, as widely as it may. Growth is the peak of the process's anonymous memory above what it held
at rest, the clients' few sockets included. A load runs in a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import socket
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from http_process import http_process
from uvicorn.server import ServerState

from kvline_contract.launch import Device
from kvline_server.http.admission import Admission
from kvline_server.http.app import create_app
from kvline_server.http.body import MAX_BODY_BYTES, Bodies
from kvline_server.http.connections import Connections
from kvline_server.http.engine_client import EngineClient
from kvline_server.http.generate import Generator, RequestLimits
from kvline_server.http.scores import NUMBER, held
from kvline_server.http.service import Service
from kvline_server.http.tokenizer_files import open_chat, open_tokens
from kvline_server.http.tokens import Tokens
from kvline_server.http.trace import Traces
from kvline_server.ipc.messages import Delta, Deltas, PackedScores, Submit
from kvline_server.options.clients import FREE_BYTES, QUEUED_BYTES, ClientLimits

RUNNING, TOP = 16, 20  # defaults on the CPU
TOKENS = 40_000  # of the KV cache: so many that bytes are the limit of scored prompts
CONTEXT, VOCABULARY = 8192, 49_152
PATIENCE = 120.0  # seconds, so that no limit of time ends what is held
SETTLED = 3.0  # seconds without growth
PART = 32 << 10
ID = 300  # Python keeps one object for each integer below 257
UNREAD = 32 << 10  # bytes of a client's socket
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n"
)


class Engine(EngineClient):
    """Answers each sequence at once with as many tokens and logprobs as may wait for a client. The
    tokens are the longest of the vocabulary."""

    def __init__(self, limits: ClientLimits, tokens: Tokens) -> None:
        super().__init__(limits.unread_tokens)
        ids = tokens.tokenizer.get_vocab().values()
        self.ids = sorted(ids, key=lambda i: -len(tokens.token_text(i)))[: TOP + 1]
        self.tasks: set[asyncio.Task[None]] = set()
        self._writer = self  # type: ignore[assignment]

    def write(self, frame: bytes) -> None:
        with contextlib.suppress(msgspec.ValidationError):  # an Abort
            asked = msgspec.msgpack.decode(frame[4:], type=Submit)
            task = asyncio.get_running_loop().create_task(self._answer(asked))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _answer(self, asked: Submit) -> None:
        params, received = asked.params, self._received[asked.id]
        if params.prompt_logprobs is not None:
            count, top = len(asked.tokens) - 1, params.prompt_logprobs
            received.prompt_scores.append(scores(count, top, self.ids))
        left = max(1, params.max_tokens)
        while left and asked.id in self._received:
            if len(received.items) >= self._unread_tokens:
                await asyncio.sleep(0.05)
                continue
            left -= 1
            one = None if params.logprobs is None else scores(1, params.logprobs, self.ids)
            end = None if left else "length"
            self._dispatch(Deltas([Delta(asked.id, [self.ids[0]], end, one)]))
            if not left % 16:
                await asyncio.sleep(0)


def scores(count: int, top: int, ids: list[int]) -> PackedScores:
    """With different alternatives, as equal ones would be one entry of an answer, and logprobs of
    as many digits as a model's."""
    numbers = array("f", [-1 / (i + 3) for i in range(top)])
    one = numbers[:1] * count
    top_ids = array("i", ids[:top])
    return PackedScores(
        count,
        top,
        (array("i", ids[:1]) * count).tobytes(),
        one.tobytes(),
        bytes(NUMBER * count),
        (top_ids * count).tobytes(),
        (numbers * count).tobytes(),
    )


class Stage:
    """The server's half, and clients' sockets."""

    def __init__(self, limits: ClientLimits, model: Path) -> None:
        self.limits = limits
        self.clients: list[socket.socket] = []
        self.connections = Connections(self.limits)
        self.admission = Admission(
            max_held=self.limits.score_bytes, max_requests=self.limits.connections
        )
        self.admission.open(RUNNING, TOKENS)
        tokens = open_tokens(model, limits.longest_text(CONTEXT))
        assert tokens is not None
        self.tokens = tokens
        self.engine = Engine(self.limits, tokens)
        generator = Generator(self.engine, tokens, Traces(None), open_chat(model, tokens))
        made = RequestLimits("m", VOCABULARY, CONTEXT, TOP, self.admission.max_tokens)
        bodies = Bodies(self.limits, self.admission.totals)
        service = Service(generator, self.admission, bodies, made, 0)
        self.config = uvicorn.Config(
            create_app(service),
            http=self.connections.make,  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
        )
        self.config.load()

    async def connect(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        self.clients.append(ours)
        ours.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, UNREAD)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD)

        def make() -> asyncio.Protocol:
            return self.connections.make(
                config=self.config, server_state=ServerState(), app_state={}
            )

        await asyncio.get_running_loop().connect_accepted_socket(make, theirs)
        return ours

    async def send(self, length: int, *parts: bytes, path: bytes = b"completions") -> None:
        """A request of so many bytes, or the part of it that is given; refused ones end early."""
        head = HEAD.replace(b"completions", path) % length
        client, loop = await self.connect(), asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            for part in (head, *parts):
                await loop.sock_sendall(client, part)

    async def ask(self, path: bytes = b"completions", **fields: Any) -> None:
        body = json.dumps({"model": "m", "ignore_eos": True, "temperature": 0, **fields}).encode()
        await self.send(len(body), body, path=path)


# Loads --------------------------------------------------------------------------------------------


async def unread(stage: Stage) -> None:
    """Streams with logprobs that nobody reads, in all places: echoed prompts, long ones, chats."""
    messages = [{"role": "user", "content": "x" * 100}]
    for number in range(stage.admission.max_sequences):
        stream: dict[str, Any] = {"stream": True, "max_tokens": 4000}
        if number % 3 == 0:
            await stage.ask(prompt=[ID] * 500, echo=True, logprobs=TOP, **stream)
        elif number % 3 == 1:
            await stage.ask(prompt=[ID] * 1000, logprobs=TOP, **stream)
        else:
            chat = {"messages": messages, "logprobs": True, "top_logprobs": TOP}
            await stage.ask(b"chat/completions", **chat, **stream)


async def scored(stage: Stage) -> None:
    """Prompts with logprobs, up to the limit of those that wait to be sent."""
    for _ in range(stage.limits.score_bytes // held(CONTEXT - 1, TOP)):
        await stage.ask(prompt=[ID] * (CONTEXT - 1), max_tokens=0, prompt_logprobs=TOP)


async def bodies_and_heads(stage: Stage) -> None:
    """Half bodies up to their limit; on all other connections large heads, with all but the end of
    a small body."""
    for _ in range(stage.limits.body_bytes // MAX_BODY_BYTES):
        await stage.send(MAX_BODY_BYTES, *[b" " * PART] * (MAX_BODY_BYTES // PART - 1))
    line = b"x: " + b"y" * 300 + b"\r\n"
    most = min(stage.limits.headers - 5, (stage.limits.head_bytes - len(HEAD)) // len(line))
    head = HEAD[:-2] % FREE_BYTES + line * most + b"\r\n"
    while len(stage.clients) < stage.limits.connections:
        client = await stage.connect()
        request = head + b" " * (FREE_BYTES - 1)
        await asyncio.get_running_loop().sock_sendall(client, request)


async def token_ids(stage: Stage) -> None:
    """Eight bodies of 520,000 short token ids at once."""
    part = b"%d," % ID * (PART // 4)
    parts = [part] * (MAX_BODY_BYTES // PART - 1)
    size = 11 + len(parts) * len(part) + 5
    sent = (stage.send(size, b'{"prompt":[', *parts, b"%d]}" % ID) for _ in range(8))
    await asyncio.gather(*sent)


async def long_texts(stage: Stage) -> None:
    """Eight texts of the longest token, which have most bytes for the tokens of the context, and
    eight in small bodies, at once."""
    texts = (stage.tokens.token_text(i) for i in stage.tokens.tokenizer.get_vocab().values())
    longest = json.dumps(max(texts, key=len))[1:-1].encode()
    text = longest * min(CONTEXT - 8, (stage.limits.longest_text(CONTEXT) - 64) // len(longest))
    start, end = b'{"model":"m","max_tokens":1,"prompt":"', b'"}'
    texts_sent = [text] * 8 + [text[: FREE_BYTES - len(start + end) - len(longest)]] * 8
    bodies = [start + t[: len(t) // len(longest) * len(longest)] + end for t in texts_sent]
    await asyncio.gather(*(stage.send(len(body), body) for body in bodies))


async def everything(stage: Stage) -> None:
    for load in (unread, scored):
        await load(stage)
    await asyncio.gather(bodies_and_heads(stage), token_ids(stage), long_texts(stage))


LOADS: dict[str, Callable[[Stage], Awaitable[None]]] = {
    "unread streams": unread,
    "scored prompts": scored,
    "half bodies and heads": bodies_and_heads,
    "bodies of token ids": token_ids,
    "long texts": long_texts,
    "all of them": everything,
}


def reserved() -> int:
    """Bytes for all of them together."""
    return ClientLimits().on(Device.CPU).memory(CONTEXT, RUNNING) + TOKENS * QUEUED_BYTES


# Measuring ----------------------------------------------------------------------------------------


def memory() -> tuple[int, int]:
    """Anonymous bytes of this process: now, and the most."""
    text = Path("/proc/self/status").read_text()
    found = {k: int(v) << 10 for k, v in re.findall(r"(VmHWM|RssAnon|RssFile):\s+(\d+)", text)}
    return found["RssAnon"], found["VmHWM"] - found["RssFile"]


def played(name: str, model: Path) -> tuple[int, int]:
    """-> bytes of growth, and how many requests were refused"""
    with http_process() as pool:
        return pool.apply(_play, (name, model))


def _play(name: str, model: Path) -> tuple[int, int]:
    logging.disable(logging.CRITICAL)  # clients leave in the middle of their answers
    return asyncio.run(play(LOADS[name], model))


async def play(load: Callable[[Stage], Awaitable[None]], model: Path) -> tuple[int, int]:
    limits = replace(
        ClientLimits().on(Device.CPU), body=PATIENCE, body_pause=PATIENCE, head=PATIENCE
    )
    stage = Stage(limits, model)
    rest, _ = memory()
    Path("/proc/self/clear_refs").write_text("5")
    await asyncio.wait_for(load(stage), PATIENCE)
    peak = 0
    while (now := memory()[1]) > peak:
        peak = now
        await asyncio.sleep(SETTLED)
    refused = stage.admission.refused
    for task in stage.engine.tasks:
        task.cancel()
    stage.connections.drop()
    return peak - rest, refused
