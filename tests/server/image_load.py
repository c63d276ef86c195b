"""Clients that send the largest images at once to a server's HTTP part with the CPU's limits, in a
process with the allocator settings of the real one; what its memory grows by."""

from __future__ import annotations

import asyncio
import json
from dataclasses import fields
from pathlib import Path

from client_load import memory
from http_process import http_process
from image_chats import chat, messages, part, text
from image_files import gradient, noise, saved
from image_kit import Pictured

from kvline_contract.launch import Device
from kvline_server.ipc.messages import Released, encode
from kvline_server.ipc.pixels import PAGE
from kvline_server.options.clients import ClientLimits

CLIENTS = 6
CHAT = "/v1/chat/completions"
LIMITS = ClientLimits().on(Device.CPU)


def bodies() -> list[tuple[str, bytes]]:
    """Of each client, with their paths in two APIs: files as large as fit, and images of as many
    pixels as may be decoded, in the format whose decoder takes the most; all with a text that makes
    parsing take the most."""
    made = []
    side = int((LIMITS.decode_bytes / 16) ** 0.5) - 40
    for seed in range(CLIENTS):
        large = saved(noise(1000, 1000, seed), "PNG")
        assert 0.9 * LIMITS.image_file_bytes() < len(large) <= LIMITS.image_file_bytes()
        wide = gradient(side - seed, side)
        for file, kind in ((large, "PNG"), (saved(wide, "WEBP", lossless=True, method=0), "WEBP")):
            parts = text("\U0001f600"), part(file, kind)
            path, body = messages(*parts) if seed % 2 else (CHAT, chat(*parts, max_tokens=1))
            written = json.dumps(body, ensure_ascii=False).replace("See.", "\\u0041")
            made.append((path, written.encode()))
    return made


def played(model: Path) -> int:
    """-> bytes of growth"""
    with http_process() as pool:
        return pool.apply(_play, (model,))


def _play(model: Path) -> int:
    return asyncio.run(play(model))


async def play(model: Path) -> int:
    limits = {field.name: getattr(LIMITS, field.name) for field in fields(LIMITS)}
    http = Pictured(model, LIMITS.pixel_bytes // PAGE, **limits)
    async with http.open():
        answering = asyncio.create_task(_answer(http))
        first = json.dumps(chat(part(noise(8, 8)))).encode()
        await _until_taken(http, CHAT, first)  # imports, threads
        sent = bodies()
        rest, _ = memory()
        Path("/proc/self/clear_refs").write_text("5")
        await asyncio.gather(*(_until_taken(http, *each) for each in sent))
        answering.cancel()
        assert http.store.decoded == len(sent) + 1
        return memory()[1] - rest


async def _answer(http: Pictured) -> None:
    while True:
        sent = await http.submitted.get()
        http.send(sent.id, [65])
        http._writer.write(encode(Released([sent.id])))


async def _until_taken(http: Pictured, path: str, body: bytes) -> None:
    """As clients do that get a 429."""
    headers, status = {"content-type": "application/json"}, 429
    while status == 429:
        answer = await http.http.post(path, content=body, headers=headers)
        status = answer.status_code
        await asyncio.sleep(0.02)
    assert status == 200, answer.text
