"""A load generator with little overhead: raw HTTP/1.1, one connection per request, several
processes. Of a stream it measures when each chunk arrives."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from dataclasses import dataclass, field

# One of them in each event of a stream that carries text, of a completion or of a chat.
PIECE, CHAT_PIECE = b'"text":', b'"content":'
PROCESSES = 4
OPEN = 2048  # concurrent requests, below the admission limit of a server with 512 running


@dataclass(frozen=True, slots=True)
class Asked:
    """One request; `at` is when it is sent, in seconds after the start."""

    prompt: list[int] | str  # a text is a chat's only message
    output: int
    at: float = 0.0
    fields: dict[str, object] = field(default_factory=dict)  # more of its body


@dataclass(frozen=True, slots=True)
class Answered:
    """In seconds after the start of all."""

    sent: float
    pieces: list[float]  # when each came; none: it was refused with a 429
    ended: float
    output: int

    @property
    def first(self) -> float:
        """Seconds from its sending to its first piece."""
        return self.pieces[0] - self.sent


def play(
    port: int,
    asked: list[Asked],
    stream: bool,
    may_refuse: bool = False,
    host: str = "127.0.0.1",
    **fields: object,
) -> list[Answered]:
    """Sends all requests from several processes. Raises RuntimeError for an incomplete answer and
    for a rejection for load unless that is allowed, ValueError for any other 4xx."""
    context = multiprocessing.get_context("spawn")
    start = time.time() + 2.0  # the processes' own start
    shares = [
        (host, port, asked[i::PROCESSES], stream, fields, start, may_refuse)
        for i in range(PROCESSES)
    ]
    with context.Pool(PROCESSES) as pool:
        return [answer for share in pool.map(_share, shares) for answer in share]


def _share(
    share: tuple[str, int, list[Asked], bool, dict[str, object], float, bool],
) -> list[Answered]:
    host, port, asked, stream, fields, start, may_refuse = share
    bodies = [_body(one, stream, fields) for one in asked]
    return asyncio.run(_all(host, port, asked, bodies, start, may_refuse))


def _body(one: Asked, stream: bool, fields: dict[str, object]) -> bytes:
    chat = isinstance(one.prompt, str)
    message = [{"role": "user", "content": one.prompt}]
    body: dict[str, object] = {
        "model": "m",
        **({"messages": message} if chat else {"prompt": one.prompt}),
        "max_tokens": one.output,
        "ignore_eos": True,
        "stream": stream,
        **fields,
        **one.fields,
    }
    data = json.dumps(body).encode()
    path = "chat/completions" if chat else "completions"
    head = f"POST /v1/{path} HTTP/1.1\r\nHost: m\r\nContent-Length: {len(data)}\r\n"
    return (head + "Content-Type: application/json\r\nConnection: close\r\n\r\n").encode() + data


async def _all(
    host: str, port: int, asked: list[Asked], bodies: list[bytes], start: float, may_refuse: bool
) -> list[Answered]:
    room = asyncio.Semaphore(OPEN // PROCESSES)

    async def one(item: Asked, body: bytes) -> Answered:
        await asyncio.sleep(max(0.0, start + item.at - time.time()))
        async with room:
            return await _ask(host, port, item, body, start, may_refuse)

    return await asyncio.gather(*(one(*pair) for pair in zip(asked, bodies, strict=True)))


async def _ask(
    host: str, port: int, item: Asked, body: bytes, start: float, may_refuse: bool
) -> Answered:
    sent = time.time()
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 22)
    writer.write(body)
    head = await reader.readuntil(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    if status == 429 and may_refuse:
        writer.close()
        return Answered(sent - start, [], time.time() - start, 0)
    if status != 200:
        kind = ValueError if 400 <= status < 500 and status != 429 else RuntimeError
        raise kind(f"{head[:60]!r} {await reader.read(300)!r}")
    pieces: list[float] = []
    tail, piece = b"", CHAT_PIECE if isinstance(item.prompt, str) else PIECE
    while data := await reader.read(1 << 16):
        seen = tail[1 - len(piece) :] + data  # a mark may come in two parts
        pieces += [time.time() - start] * seen.count(piece)
        tail = (tail + data)[-400:]
    writer.close()
    if not (b"[DONE]" in tail or b"completion_tokens" in tail):
        raise RuntimeError(f"an answer was cut: {tail!r}")
    return Answered(sent - start, pieces, time.time() - start, item.output)
