"""A load generator with little overhead: raw HTTP/1.1, one connection per request, several
processes. Of a stream it measures when the first and the last chunk arrive."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from dataclasses import dataclass

PROCESSES = 4
OPEN = 2048  # concurrent requests, below the admission limit of a server with 512 running


@dataclass(frozen=True, slots=True)
class Asked:
    """One request; `at` is when it is sent, in seconds after the start."""

    prompt: list[int]
    output: int
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Answered:
    """Seconds after the request was sent, and when it ended after the start of all."""

    first: float
    last: float
    ended: float
    output: int


def play(port: int, asked: list[Asked], stream: bool, **fields: object) -> list[Answered]:
    """Sends all requests from several processes. Raises RuntimeError for an incomplete answer."""
    context = multiprocessing.get_context("spawn")
    start = time.time() + 2.0  # the processes' own start
    shares = [
        (port, asked[i::PROCESSES], stream, fields, start, OPEN // PROCESSES)
        for i in range(PROCESSES)
    ]
    with context.Pool(PROCESSES) as pool:
        return [answer for share in pool.map(_share, shares) for answer in share]


def _share(
    share: tuple[int, list[Asked], bool, dict[str, object], float, int],
) -> list[Answered]:
    port, asked, stream, fields, start, most = share
    bodies = [_body(one, stream, fields) for one in asked]
    return asyncio.run(_all(port, asked, bodies, start, most))


def _body(one: Asked, stream: bool, fields: dict[str, object]) -> bytes:
    body = {
        "model": "m",
        "prompt": one.prompt,
        "max_tokens": one.output,
        "ignore_eos": True,
        "stream": stream,
        **fields,
    }
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: m\r\nContent-Length: {len(data)}\r\n"
    return (head + "Content-Type: application/json\r\nConnection: close\r\n\r\n").encode() + data


async def _all(
    port: int, asked: list[Asked], bodies: list[bytes], start: float, most: int
) -> list[Answered]:
    room = asyncio.Semaphore(most)

    async def one(item: Asked, body: bytes) -> Answered:
        await asyncio.sleep(max(0.0, start + item.at - time.time()))
        async with room:
            return await _ask(port, item, body, start)

    return await asyncio.gather(*(one(*pair) for pair in zip(asked, bodies, strict=True)))


async def _ask(port: int, item: Asked, body: bytes, start: float) -> Answered:
    sent = time.time()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
    writer.write(body)
    head = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n", 1)[0]:
        raise RuntimeError(f"{head[:60]!r} {await reader.read(300)!r}")
    first, tail = 0.0, b""
    while data := await reader.read(1 << 16):
        first = first or time.time()
        tail = (tail + data)[-400:]
    writer.close()
    now = time.time()
    if not (b"[DONE]" in tail or b"completion_tokens" in tail):
        raise RuntimeError(f"an answer was cut: {tail!r}")
    return Answered(first - sent, now - sent, now - start, item.output)
