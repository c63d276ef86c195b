"""Answers with logprobs from a scripted engine: who is let in, and what is then counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import scripted

from kvline_contract.launch import Device
from kvline_server.http.scores import ENTRY, held
from kvline_server.ipc.messages import PackedScores
from kvline_server.ipc.totals import SCORE_BYTES, SEQUENCES
from kvline_server.options.clients import ClientLimits

TOP = 5
TOKEN_BYTES = held(1, TOP) + ENTRY
SCORES = PackedScores(1, TOP, bytes(4), bytes(4), bytes(4), bytes(4 * TOP), bytes(4 * TOP))


class Scripted(scripted.Scripted):
    def ask(self, **fields: Any) -> asyncio.Task[httpx.Response]:
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "hi"}],
            "logprobs": True,
            "top_logprobs": TOP,
            **fields,
        }
        return asyncio.create_task(self.http.post("/v1/chat/completions", json=body))

    async def answer(self, count: int, finish: str | None = "stop") -> None:
        """So many output tokens for the next sequence."""
        self.send((await self.asked()).id, [5] * count, finish, SCORES)


@pytest.fixture
def play(tiny_model: Path) -> Callable[..., None]:
    def run(story: Callable[[Scripted], Any], max_held: int) -> None:
        async def whole() -> None:
            made = Scripted(tiny_model, max_held)
            async with made.open():
                await story(made)
                totals = made.admission.totals
                assert totals[SCORE_BYTES] == totals[SEQUENCES] == 0

        asyncio.run(whole())

    return run


@pytest.mark.parametrize("requests, n", [(8, 1), (1, 4), (16, 1), (1, 8)])
def test_an_idle_server_lets_in_chats_that_could_fill_the_context(
    play: Callable[..., None], requests: int, n: int
) -> None:
    """None says how long its answer becomes: of eight at once, five were refused, and n=4 too."""

    async def story(scripted: Scripted) -> None:
        asked = [scripted.ask(n=n) for _ in range(requests)]
        for _ in range(requests * n):
            await scripted.answer(20)
        for answer in await asyncio.gather(*asked):
            assert answer.status_code == 200
            assert [len(c["logprobs"]["content"]) for c in answer.json()["choices"]] == [20] * n

    play(story, ClientLimits().on(Device.CPU).score_bytes)


def test_scores_are_counted_as_they_come(play: Callable[..., None]) -> None:
    async def story(scripted: Scripted) -> None:
        long = scripted.ask()
        await scripted.answer(700, finish=None)
        while scripted.admission.totals[SCORE_BYTES] < 700 * TOKEN_BYTES:
            await asyncio.sleep(0.001)
        other = scripted.ask()
        await scripted.answer(400)
        assert (await other).status_code == 429
        assert scripted.admission.totals[SCORE_BYTES] == 700 * TOKEN_BYTES
        other = scripted.ask()
        await scripted.answer(200)
        assert (await other).status_code == 200
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)

    play(story, 1000 * TOKEN_BYTES)


def test_an_answer_with_more_scores_than_all_may_have_is_refused(
    play: Callable[..., None],
) -> None:
    async def story(scripted: Scripted) -> None:
        asked = scripted.ask()
        await scripted.answer(1001)
        refused = await asked
        assert refused.status_code == 400
        assert "or for a stream" in refused.json()["error"]["message"]

    play(story, 1000 * TOKEN_BYTES)
