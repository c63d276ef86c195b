"""CPU time of a streamed token of chats, with the parser of tool calls on and off: of an HTTP
process alone, from the frames of the engine to the bytes of its events, 64 chats at once."""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
import time
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from record import record, table
from shapes import write_tokenizer
from tokenizers import Tokenizer

from kvline_contract.launch import ToolCallParser
from kvline_server.http.admission import Admission
from kvline_server.http.app import create_app
from kvline_server.http.body import Bodies
from kvline_server.http.engine_client import EngineClient
from kvline_server.http.generate import Generator, RequestLimits
from kvline_server.http.service import Service
from kvline_server.http.tokenizer_files import open_chat
from kvline_server.http.tokens import Tokens
from kvline_server.http.trace import Traces
from kvline_server.ipc import messages
from kvline_server.ipc.messages import Delta, Deltas, Submit
from kvline_server.options.clients import ClientLimits

ROUNDS, CHATS, OUTPUT, VOCABULARY = 20, 64, 200, 512
MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{{ messages[0].content }}<tool_call>"
    "{% for c in messages[0].tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"s": "'
Scope = MutableMapping[str, Any]


def run() -> None:
    costs = asyncio.run(_measured())
    off, rows = costs["off"], []
    for name, taken in costs.items():
        ratio = min(off) / min(taken)
        record(f"http-tools-ms-{name}", min(taken), "ms", (min(taken), max(taken)))
        rows.append([name, f"{min(taken):.2f}; {max(taken):.2f}", f"{ratio:.3f}"])
        record(f"http-tools-ratio-{name}", ratio, "", (ratio, ratio))
    title = (
        f"An HTTP process, {CHATS} streamed chats of {OUTPUT} tokens, best and worst of {ROUNDS}"
    )
    columns = ["parser", "CPU ms a 1,000 tokens", "rate of the best, of off"]
    table(title, columns, rows)


async def _measured() -> dict[str, list[float]]:
    """ms of CPU a 1,000 tokens, by round."""
    with tempfile.TemporaryDirectory() as scratch:
        plain, thinks = Path(scratch, "plain"), Path(scratch, "thinks")
        for folder, marks in ((plain, MARKS[:2]), (thinks, MARKS)):
            folder.mkdir()
            write_tokenizer(folder, VOCABULARY)
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            tokenizer.add_tokens(marks)
            tokenizer.save(str(folder / "tokenizer.json"))
            (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
        one, other = _Process(plain), _Process(thinks)
        await one.open()
        await other.open()
        text = [300 + i % 200 for i in range(OUTPUT)]
        call = one.tokens.encode(CALL)
        call += text[len(call) :]
        thought = [other.tokens.added["<think>"], *text[1:]]
        variants = {
            "off": (one, {}, text),
            "text": (one, {"tools": [TOOL]}, text),
            "call": (one, {"tools": [TOOL]}, call),
            "text of a model that reasons": (other, {"tools": [TOOL]}, text),
            "reasoning": (other, {"tools": [TOOL]}, thought),
        }
        costs: dict[str, list[float]] = {name: [] for name in variants}
        for round in range(ROUNDS + 1):
            for name, (process, fields, output) in variants.items():
                cost = await process.cost(fields, output)
                if round:  # the first warms up
                    costs[name].append(cost)
        await one.close()
        await other.close()
        return costs


class _Process:
    """An application of the server with an engine at the other end of its socket."""

    def __init__(self, folder: Path) -> None:
        self.tokens = Tokens(folder)
        admission = Admission()
        admission.open(CHATS, 1 << 20)
        self._engine = EngineClient(1000)
        chat = open_chat(folder, self.tokens, parser=ToolCallParser.HERMES)
        generator = Generator(self._engine, self.tokens, Traces(None), chat)
        limits = RequestLimits("m", VOCABULARY + len(MARKS), 4096, 20, 1 << 20)
        bodies = Bodies(ClientLimits(), admission.totals)
        self._app = create_app(Service(generator, admission, bodies, limits, 0))

    async def open(self) -> None:
        here, there = socket.socketpair()
        await self._engine.connect(here, 16)
        self._reader, self._writer = await asyncio.open_connection(sock=there)

    async def close(self) -> None:
        self._writer.close()
        await self._engine.lost.wait()

    async def cost(self, fields: dict[str, Any], output: list[int]) -> float:
        tasks = [asyncio.create_task(self._chat(fields)) for _ in range(CHATS)]
        ids: list[int] = []
        while len(ids) < CHATS:
            message = await messages.read(self._reader)
            if isinstance(message, Submit):
                ids.append(message.id)
                # A prompt's first chat goes before the others.
                self._write([message.id], output[0], None)
        frames = [
            (token, "length" if at == OUTPUT - 1 else None) for at, token in enumerate(output)
        ]
        encoded = [
            messages.encode(Deltas([Delta(id, [token], finish) for id in ids]))
            for token, finish in frames[1:]
        ]
        await asyncio.sleep(0.05)
        begun = time.process_time()
        for frame in encoded:  # each of a step of its own
            self._writer.write(frame)
            for _ in range(6):
                await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        return (time.process_time() - begun) * 1e6 / (CHATS * len(encoded))

    def _write(self, ids: list[int], token: int, finish: str | None) -> None:
        deltas = [Delta(id, [token], finish) for id in ids]
        self._writer.write(messages.encode(Deltas(deltas)))

    async def _chat(self, fields: dict[str, Any]) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        raw = json.dumps(body | fields).encode()
        headers = [(b"content-type", b"application/json")]
        scope: Scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions"}
        more: Scope = {"query_string": b"", "headers": headers, "asgi": {"version": "3.0"}}
        received = iter([{"type": "http.request", "body": raw, "more_body": False}])
        waits = asyncio.Event()

        async def receive() -> Scope:
            message = next(received, None)
            if message is None:
                await waits.wait()
            return message or {"type": "http.disconnect"}

        async def send(message: Scope) -> None:
            status = message.get("status", 200)
            if status != 200:
                raise RuntimeError(f"a chat was answered {status}")

        await self._app({**scope, **more}, receive, send)
