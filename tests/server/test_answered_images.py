"""Chats with images, from JSON to an engine: its encoder gets the pixels that were drawn, answers
depend on them, and their memory is free when nobody reads it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_chats import chat, part, text
from image_files import gradient, noise
from image_kit import Pictured, served
from PIL import Image
from waiting import limit

from kvline_server.ipc.messages import WRONG_PIXELS

FIRST, SECOND = noise(16, 24, 1), noise(24, 16, 2)
Story = Callable[[Pictured, Any], Any]


def play(folder: Path, story: Story, **of: Any) -> None:
    async def run() -> None:
        async with served(folder, **of) as (http, recording):
            await story(http, recording)

    asyncio.run(run())


def drawn(image: Image.Image) -> np.ndarray:
    return np.asarray(image)


def test_the_encoder_gets_the_pixels_that_were_drawn(image_model: Path) -> None:
    async def story(http: Pictured, recording: Any) -> None:
        body = chat(text("a"), part(FIRST), text("b"), part(SECOND), part(FIRST, "WEBP"))
        answer = await http.ask(body)
        assert answer.status_code == 200, answer.text
        got = [image for begun in recording.begun for image in begun]
        assert len(got) == 3 and np.array_equal(got[0], drawn(FIRST))
        assert np.array_equal(got[1], drawn(SECOND)) and got[2].shape == (24, 16, 3)
        usage = answer.json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 0, "image_tokens": 18}
        await http.settled()

    play(image_model, story)


def test_answers_are_those_of_their_picture_and_pages_of_two_are_never_shared(
    image_model: Path,
) -> None:
    """The ids of both prompts are equal, and longer than a page behind the image too."""

    async def story(http: Pictured, recording: Any) -> None:
        other = noise(16, 24, 3)
        words = text("What is it? " * 4)
        answers, cached = [], []
        for image in (FIRST, other, FIRST, other):
            body = chat(part(image), words, logprobs=True, top_logprobs=5, max_tokens=6)
            answer = (await http.ask(body)).json()
            answers.append(answer["choices"][0]["logprobs"]["content"])
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        first, second = cached[0], cached[1]
        assert first == 0 and second <= 16, "at most the page before the image"
        assert min(cached[2:]) >= 32, "of the same picture all but the last page are there"
        assert answers[0] != answers[1]
        for again, before in ((answers[2], answers[0]), (answers[3], answers[1])):
            for a, b in zip(again, before, strict=True):
                assert a["token"] == b["token"] and a["logprob"] == pytest.approx(b["logprob"])
        assert len(recording.begun) == 2, "the encoder's cache has both"

    play(image_model, story)


def test_choices_share_their_pixels_and_prompt_logprobs_work(image_model: Path) -> None:
    async def story(http: Pictured, recording: Any) -> None:
        body = chat(part(FIRST), text("x" * 20), n=3, prompt_logprobs=0, temperature=1.0, seed=5)
        answer = (await http.ask(body)).json()
        assert len(answer["choices"]) == 3
        assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
        assert all(answer["prompt_logprobs"][1:])
        assert len(recording.begun) == 1 and http.store.decoded == 1
        await http.settled()

    play(image_model, story)


def test_a_stream_counts_image_tokens(image_model: Path) -> None:
    async def story(http: Pictured, recording: Any) -> None:
        options = {"include_usage": True}
        body = chat(part(FIRST), stream=True, stream_options=options)
        answer = await http.ask(body)
        last = answer.text.split("\n\n")[-3].removeprefix("data: ")
        details = json.loads(last)["usage"]["prompt_tokens_details"]
        assert details == {"cached_tokens": 0, "image_tokens": 6}
        plain = (await http.ask(chat(text("a")))).json()["usage"]["prompt_tokens_details"]
        assert plain == {"cached_tokens": plain["cached_tokens"]}, "only where there are images"

    play(image_model, story)


def test_pixels_are_free_when_a_client_leaves(image_model: Path) -> None:
    """The encoder never comes to an end, so the sequence never begins."""

    async def story(http: Pictured, recording: Any) -> None:
        request = asyncio.create_task(http.ask(chat(part(FIRST), max_tokens=200)))
        while not recording.begun:
            await asyncio.sleep(0.01)
        assert http.read() > 0
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await http.settled()
        recording.left = recording.passes = 1
        assert (await http.ask(chat(part(SECOND)))).status_code == 200
        await http.settled()

    play(image_model, story, passes=1 << 40)


def test_pixels_are_free_when_a_sequence_fails(image_model: Path) -> None:
    async def story(http: Pictured, recording: Any) -> None:
        table = recording.table
        recording.table = np.full(table.shape, np.nan)  # nothing is written to the rows
        table[:] = float("nan")
        begin = recording.begin

        def without_rows(images: list[np.ndarray], rows: np.ndarray) -> None:
            recording.begun.append(images)
            recording.left = 1

        recording.begin = without_rows
        answer = await http.ask(chat(part(FIRST)))
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "not_finite")
        await http.settled()
        recording.begin, recording.table = begin, table
        assert (await http.ask(chat(part(SECOND)))).status_code == 200

    play(image_model, story)


@pytest.mark.parametrize(("parts", "times"), [(1, 1), (2, 2), (3, 1)])
def test_a_client_is_answered_by_its_own_picture_however_often_others_sent_it(
    image_model: Path, parts: int, times: int
) -> None:
    """There is room for two pictures. A sequence waits for the encoder with the one that others had
    in several parts of a request, or left; another client's new one does not get its place."""
    shown, held, new = (noise(64, 64, seed) for seed in (1, 2, 3))

    async def story(http: Pictured, recording: Any) -> None:
        words = iter("abcdefgh")  # one of two equal prompts would wait for the other

        def ask(image: Image.Image, count: int = 1) -> asyncio.Task[Any]:
            body = chat(text(next(words)), *[part(image)] * count)
            return asyncio.create_task(http.ask(body))

        async def until_read(sequences: int) -> None:
            """So many sequences read pixels, as far as this process knows."""
            async with asyncio.timeout(limit(20)):
                while len(http.client._reads) != sequences:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)

        for _ in range(times):
            assert (await ask(shown, parts)).status_code == 200
        await until_read(0)
        recording.begun.clear()
        recording.passes = 1 << 40
        first = ask(held)
        await until_read(1)
        second = ask(shown)
        await until_read(2)
        leaves = ask(shown)
        await until_read(3)
        leaves.cancel()
        await until_read(2)
        third = ask(new)
        await asyncio.sleep(0.2)
        recording.left = recording.passes = 1
        answers = await asyncio.gather(first, second, third)
        assert [answer.status_code for answer in answers] == [200] * 3
        got = [image for begun in recording.begun for image in begun]
        assert len(got) == 3
        for image, expected in zip(got, (held, shown, new), strict=True):
            assert np.array_equal(image, drawn(expected))
        await http.settled()

    play(image_model, story, pages=6, cached=64)


def test_pixels_that_changed_before_they_were_encoded_are_no_one_s_answer(
    image_model: Path,
) -> None:
    async def story(http: Pictured, recording: Any) -> None:
        first = asyncio.create_task(http.ask(chat(part(FIRST))))
        while not recording.begun:
            await asyncio.sleep(0.01)
        lost = asyncio.create_task(http.ask(chat(part(SECOND))))
        while len(http.client._reads) < 2:
            await asyncio.sleep(0.01)
        (offset,) = {image.offset for image in http.store._known.values()} - {0}
        http.places.write(offset, drawn(noise(24, 16, 7)))
        recording.left = recording.passes = 1
        answer = await lost
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "image_lost")
        assert WRONG_PIXELS in answer.json()["error"]["message"]
        assert (await first).status_code == 200
        assert len(recording.begun) == 1, "the other's pixels never reached the encoder"
        await http.settled()

    play(image_model, story, passes=1 << 40)


def test_many_at_once_with_room_for_a_few_all_get_their_own_answer(image_model: Path) -> None:
    """Each picture, alone and then beside others, with one text of the same ids."""

    async def story(http: Pictured, recording: Any) -> None:
        images = [noise(32, 32, seed) for seed in range(12)] + [gradient(32, 32)]
        bodies = [chat(part(i), text("?"), logprobs=True, max_tokens=3) for i in images]
        alone = [(await http.ask(body)).json() for body in bodies]
        bodies.append(chat(text("a text"), max_tokens=9))
        together = await asyncio.gather(*map(http.ask, bodies))
        assert [answer.status_code for answer in together] == [200] * len(bodies)
        for before, answer in zip(alone, together, strict=False):
            ours, theirs = (
                [
                    (t["token"], round(t["logprob"], 3))
                    for t in a["choices"][0]["logprobs"]["content"]
                ]
                for a in (before, answer.json())
            )
            assert ours == theirs
        await http.settled()

    play(image_model, story, pages=3)
