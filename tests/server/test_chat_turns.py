"""A chat that is rendered holds none of the turns to parse and tokenise."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from chats import EACH
from waiting import limit

from kvline_server.http.admission import Admission
from kvline_server.http.app import create_app
from kvline_server.http.body import Bodies
from kvline_server.http.chat_tokens import ChatTokens
from kvline_server.http.engine_client import EngineClient
from kvline_server.http.generate import Generator, RequestLimits
from kvline_server.http.service import Service
from kvline_server.http.template_files import ChatFiles
from kvline_server.http.tokens import Tokens
from kvline_server.http.trace import Traces
from kvline_server.options.clients import FREE_BYTES, ClientLimits

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
CONTEXT = 64


@pytest.mark.parametrize("more", [0, FREE_BYTES], ids=["small", "large"])
def test_completions_are_answered_while_templates_loop(tiny_model: Path, more: int) -> None:
    """With one turn of each kind, as an HTTP process of several on the CPU has."""
    tokens = Tokens(tiny_model)
    chat = ChatTokens(tokens, ChatFiles(ENDLESS + EACH))
    admission = Admission()
    admission.open(16, 65_536)
    generator = Generator(EngineClient(9), tokens, Traces(None), chat)
    bodies = Bodies(ClientLimits(small=1, parsing=1), admission.totals)
    limits = RequestLimits("m", 307, CONTEXT, 20, 1 << 20)
    app = create_app(Service(generator, admission, bodies, limits, 0))
    text = "x" * (CONTEXT + more)
    asked = {"model": "m", "messages": [{"role": "user", "content": text}]}

    async def play() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://m", timeout=limit(60)
        ) as http:
            loops = [
                asyncio.create_task(http.post("/v1/chat/completions", json=asked)) for _ in range(3)
            ]
            assert chat._renderers is not None
            while not chat._renderers._idle.empty():
                await asyncio.sleep(0.01)
            refused = await http.post(
                "/v1/completions",
                json={"model": "m", "prompt": text},
            )
            assert refused.json()["error"]["code"] == "context_length_exceeded"
            assert not any(task.done() for task in loops)
            for task in loops:
                assert "of CPU time" in (await task).json()["error"]["message"]

    asyncio.run(play())
