"""Images in chats that are refused: a 400 with the place of each, and nothing left."""

from __future__ import annotations

import asyncio
import base64
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from image_chats import chat, part, text
from image_files import noise, png, saved
from image_kit import IMAGE, LARGE, Pictured, play, refusal, release

from kvline_server.ipc.totals import BODY_BYTES, DECODE_BYTES, SEQUENCES

BROKEN = saved(LARGE, "PNG")[:-600]
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (part(BROKEN), "image_url: expected a whole PNG", "invalid_value"),
    (part(b"GIF"), "image_url: expected a PNG, JPEG, WebP or GIF", "invalid_value"),
    (part(png(60_000, 60_000)), "image_url: expected at most 50000000 pixels", "invalid_value"),
    (part(noise(2, 700)), "image_url: expected sides of a ratio of at most 200", "invalid_value"),
    (part(IMAGE, detail="medium"), "image_url.detail: Input should be", "invalid_value"),
    (part(IMAGE, size=3), "image_url.size: is not a field", "unknown_parameter"),
    (
        {"type": "image_url", "image_url": {"url": "https://a.example/b.png"}},
        "image_url: expected a URL such as data:image/png;base64,iVBORw0..., got one of https",
        "invalid_value",
    ),
    ({"type": "image_url"}, "image_url: is required", "missing_required_parameter"),
    ({"type": "image_url", "image_url": "data:"}, "image_url: must be an object", "invalid_type"),
    (
        {"type": "input_audio", "input_audio": {}},
        "type: input_audio is not supported here; only text and image_url parts are taken",
        "unsupported_value",
    ),
]


@pytest.mark.parametrize(("wrong", "named", "code"), REFUSED, ids=lambda v: str(v)[:40])
def test_a_wrong_part_is_a_400_with_its_place(
    image_model: Path, wrong: dict[str, Any], named: str, code: str
) -> None:
    async def story(http: Pictured) -> None:
        error = await refusal(http, chat(text("a"), part(IMAGE), wrong))
        assert error["message"].startswith(f"messages[1].content[2].{named}"), error["message"]
        assert error["param"] == error["message"].partition(":")[0] and error["code"] == code
        assert http.submitted.empty()
        await http.settled()
        held = (http.admission.totals[kind] for kind in (SEQUENCES, BODY_BYTES, DECODE_BYTES))
        assert list(held) == [0, 0, 0]

    play(image_model, story)


@pytest.mark.parametrize("role", ["system", "developer", "assistant"])
def test_only_what_a_user_or_a_tool_says_has_images(image_model: Path, role: str) -> None:
    async def story(http: Pictured) -> None:
        body = chat(text("a"))
        body["messages"].append({"role": role, "content": [text("a"), part(IMAGE)]})
        error = await refusal(http, body)
        assert error["param"] == "messages[2].content[1].image_url"
        assert f"this is of role {role}" in error["message"]
        assert error["code"] == "unsupported_value"

    play(image_model, story)


def test_bounds_of_a_request_are_named(image_model: Path) -> None:
    async def story(http: Pictured) -> None:
        error = await refusal(http, chat(*[part(IMAGE)] * 5))
        assert error["message"].startswith("messages: expected at most 4 images in a request")
        http.service.limits = replace(http.service.limits, max_model_len=500)
        error = await refusal(http, chat(*[part(LARGE)] * 4, text("x" * 250)))
        assert error["code"] == "context_length_exceeded", "images count with their tokens"
        body = chat(text("a"), part(IMAGE), continue_final_message=True)
        error = await refusal(http, body)
        assert error["message"] == "continue_final_message: not of a message with images"
        http.service.bodies.limits = http.store.limits = type(http.limits)(decode_bytes=99_999)
        error = await refusal(http, chat(part(LARGE)))
        assert error["param"] == "messages[1].content[0].image_url"
        assert "at most 99999 bytes to decode, got one of 64 x 64 pixels" in error["message"]

    play(image_model, story)


def test_a_server_of_text_alone_says_so(image_model: Path) -> None:
    async def story(http: Pictured) -> None:
        http.service.generator.images = None
        error = await refusal(http, chat(text("a"), part(IMAGE)))
        assert error["message"].startswith(
            "messages[1].content[1].image_url: this server takes text alone; "
        )
        assert "spec.engine.modalities" in error["message"]
        assert error["code"] == "unsupported_value"

    play(image_model, story)


def test_no_mutated_url_gives_more_than_a_400(image_model: Path) -> None:
    """Each is tried alone; what is taken by luck is answered."""
    rng, files = random.Random(5), [saved(IMAGE, kind) for kind in ("PNG", "JPEG", "WEBP", "GIF")]

    def mutated() -> dict[str, Any]:
        made = part(rng.choice(files))
        url = bytearray(made["image_url"]["url"].encode())
        for _ in range(rng.choice((1, 1, 3, 20))):
            at = rng.randrange(rng.choice((30, len(url) + 1)))
            if rng.random() < 0.5:
                url[at : at + rng.choice((0, 1, 40))] = bytes([rng.randrange(32, 127)])
            else:
                url = url[: rng.randrange(len(url) + 1)] + url[at:]
        made["image_url"]["url"] = url.decode()
        if rng.random() < 0.3:  # valid base64 of a broken file
            data = bytearray(rng.choice(files))
            for _ in range(rng.choice((1, 4))):
                data[rng.randrange(len(data))] = rng.randrange(256)
            head = "data:image/png;base64,"
            made["image_url"]["url"] = head + base64.b64encode(data).decode()
        return made

    async def story(http: Pictured) -> None:
        counts = {200: 0, 400: 0}

        async def answer() -> None:
            while True:
                sent = await http.asked()
                http.send(sent.id, [65])
                release(http, sent)

        answering = asyncio.create_task(answer())
        for _ in range(2000):
            got = await http.ask(chat(text("a"), mutated()))
            counts[got.status_code] += 1
            if got.status_code == 400:
                assert got.json()["error"]["param"] == "messages[1].content[1].image_url"
        answering.cancel()
        assert counts[400] > 1000
        await http.settled()
        assert http.admission.totals[SEQUENCES] == http.admission.totals[DECODE_BYTES] == 0

    play(image_model, story)
