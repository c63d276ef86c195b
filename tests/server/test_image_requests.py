"""Images in /v1/chat/completions before any engine: what is sent on, and whose pixels stay in
memory for how long."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_chats import PAD, chat, part, text
from image_files import noise, saved, turned
from image_kit import IMAGE, LARGE, Pictured, answered, play, refusal, release
from tokenizers import AddedToken
from waiting import limit

from kvline_server.errors import ModelInvalid
from kvline_server.http import image_store
from kvline_server.http.chat_tokens import Asked, ChatTokens
from kvline_server.http.images import read_token
from kvline_server.images.pixels import Pixels, pixels
from kvline_server.ipc.pixels import PAGE, SharedPixels
from kvline_server.ipc.totals import BODY_BYTES, DECODE_BYTES, SEQUENCES


def test_an_image_is_sent_by_its_place_and_its_tokens_are_in_the_prompt(image_model: Path) -> None:
    async def story(http: Pictured) -> None:
        sent, answer = await answered(http, chat(text("A"), part(IMAGE), text("B"), part(LARGE)))
        first, second = sent.images
        pad = http.tokens.special[PAD]
        assert (first.rows, first.columns, second.rows, second.columns) == (3, 2, 8, 8)
        inside = [i for i, token in enumerate(sent.tokens) if token == pad]
        of_both = [*range(first.start, first.start + 6), *range(second.start, second.start + 64)]
        assert inside == of_both
        assert sent.tokens[first.start - 2] == http.tokens.tokenizer.token_to_id("A")
        assert answer["usage"]["prompt_tokens"] == len(sent.tokens)
        assert answer["usage"]["prompt_tokens_details"]["image_tokens"] == 70
        shared = SharedPixels(http.pixels_fd)
        for image, drawn in ((first, IMAGE), (second, LARGE)):
            view = shared.view(image.offset, image.height, image.width)
            assert np.array_equal(view, np.asarray(drawn))
        assert first.digest != second.digest and len(first.digest) == 32

    play(image_model, story)


def test_a_text_alone_is_sent_as_it_was(image_model: Path) -> None:
    """As a string, and as parts, to a template that would write parts otherwise."""

    async def story(http: Pictured) -> None:
        first, _ = await answered(http, chat(text("a"), text("b")))
        body = chat(text(""))
        body["messages"][1]["content"] = "ab"
        second, _ = await answered(http, body)
        assert first.tokens == second.tokens and first.images == second.images == []

    play(image_model, story)


def test_a_client_s_text_of_the_image_s_token_stands_for_none(image_model: Path) -> None:
    async def story(http: Pictured) -> None:
        sent, _ = await answered(http, chat(text(PAD), part(IMAGE), text(f"{PAD}{PAD}")))
        assert sent.tokens.count(http.tokens.special[PAD]) == 6

    play(image_model, story)


def test_tokens_of_images_are_counted_by_tokenize(image_model: Path) -> None:
    async def story(http: Pictured) -> None:
        body = chat(text("A"), part(IMAGE))
        sent, _ = await answered(http, body)
        fields = {"model": "tiny", "messages": body["messages"]}
        answer = await http.http.post("/tokenize", json=fields)
        assert answer.json()["tokens"] == sent.tokens
        assert http.store.decoded == 1, "and nothing is decoded"

    play(image_model, story)


def test_a_file_that_comes_again_is_decoded_once(image_model: Path) -> None:
    async def story(http: Pictured) -> None:
        first, _ = await answered(http, chat(part(IMAGE), part(IMAGE)))
        again, _ = await answered(http, chat(part(IMAGE)))
        assert first.images[0].offset == first.images[1].offset == again.images[0].offset
        assert http.store.decoded == 1
        await answered(http, chat(part(IMAGE, "JPEG")))
        await answered(http, chat(part(LARGE)))
        await answered(http, chat(part(LARGE, detail="low")))
        assert http.store.decoded == 3, "low is no other size of such a small image"

    play(image_model, story)


def test_a_file_that_lies_on_its_side_is_another(image_model: Path) -> None:
    """Only its EXIF differs, which the decoder is not given."""

    async def story(http: Pictured) -> None:
        for orientation, rows in ((1, 3), (6, 2), (1, 3)):
            file = saved(IMAGE, "JPEG", exif=turned(orientation))
            sent, _ = await answered(http, chat(part(file, "JPEG")))
            assert sent.images[0].rows == rows and sent.images[0].height == 8 * rows

    play(image_model, story)


def test_pixels_stay_until_the_engine_has_released_them(image_model: Path) -> None:
    """Of a client that has left too: the engine may read them still."""

    async def story(http: Pictured) -> None:
        asking = asyncio.create_task(http.ask(chat(part(LARGE), n=2)))
        first = await http.asked()
        http.send(first.id, [65], None)
        second = await http.asked()
        assert second.images == first.images
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert {await http.aborted.get(), await http.aborted.get()} == {first.id, second.id}
        assert http.read() == 3 * PAGE
        release(http, first)
        await asyncio.sleep(0.05)
        assert http.read() == 3 * PAGE
        release(http, second)
        await http.settled()

    play(image_model, story)


def test_a_request_waits_for_room_and_the_next_after_it(image_model: Path) -> None:
    async def story(http: Pictured) -> None:
        asking = [asyncio.create_task(http.ask(chat(part(noise(64, 64, i))))) for i in range(3)]
        first = await http.asked()
        await asyncio.sleep(0.05)
        assert http.submitted.empty() and http.read() == 3 * PAGE
        for _ in range(2):
            http.send(first.id, [65])
            await asyncio.sleep(0.05)
            assert http.submitted.empty(), "answered, but the engine may read"
            release(http, first)
            first = await http.asked()
        http.send(first.id, [65])
        release(http, first)
        assert [answer.status_code for answer in await asyncio.gather(*asking)] == [200] * 3
        await http.settled()

    play(image_model, story, pages=5)


def test_who_waits_for_much_room_is_not_overtaken(image_model: Path) -> None:
    async def story(http: Pictured) -> None:
        asking = [asyncio.create_task(http.ask(chat(part(LARGE))))]
        large = await http.asked()
        all_pages = chat(part(noise(64, 64, 9)), part(noise(16, 24, 9)))
        asking.append(asyncio.create_task(http.ask(all_pages)))
        while not http.store._turn.locked():  # until it waits for room
            await asyncio.sleep(0.01)
        asking.append(asyncio.create_task(http.ask(chat(part(IMAGE)))))  # would fit beside LARGE
        await asyncio.sleep(0.1)
        assert http.submitted.empty()
        http.send(large.id, [65])
        release(http, large)
        for heights in ([64, 24], [24]):
            other = await http.asked()
            assert [image.height for image in other.images] == heights
            http.send(other.id, [65])
            release(http, other)
        assert [answer.status_code for answer in await asyncio.gather(*asking)] == [200] * 3

    play(image_model, story, pages=4)


def test_who_waits_too_long_gets_a_429_and_what_never_fits_a_400(image_model: Path) -> None:
    async def story(http: Pictured) -> None:
        asking = asyncio.create_task(http.ask(chat(part(LARGE))))
        sent = await http.asked()
        error = await refusal(http, chat(part(noise(64, 64, 9))), 429)
        assert error["code"] == "rate_limit_exceeded"
        assert http.admission.rejected == 1 and http.admission.totals[SEQUENCES] == 1
        error = await refusal(http, chat(part(noise(64, 64, 9)), part(noise(64, 64, 8))))
        assert error["message"].startswith(f"messages: its images have {6 * PAGE} bytes of pixels")
        http.send(sent.id, [65])
        release(http, sent)
        assert (await asking).status_code == 200
        await answered(http, chat(part(noise(64, 64, 9))))

    play(image_model, story, pages=5, image_wait=1)


def test_who_leaves_while_its_image_waits_to_be_decoded_leaves_nothing(
    image_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(http: Pictured) -> None:
        totals, most = http.admission.totals, http.limits.decode_bytes
        assert totals.take((DECODE_BYTES, most, most)), "of another process"
        asking = [asyncio.create_task(http.ask(chat(part(IMAGE)))) for _ in range(2)]
        while not http.read():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await http.settled()
        assert http.places.used == 0 and totals[BODY_BYTES] == 0
        totals.give((DECODE_BYTES, most))
        await answered(http, chat(part(IMAGE)))
        assert http.store.decoded == 1 and totals[DECODE_BYTES] == 0

    play(image_model, story)


def test_a_thread_that_decodes_keeps_its_place_when_its_client_leaves(
    image_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def slow(*of: Any) -> Pixels:
        begun.set()
        assert goes_on.wait(limit(20))
        return pixels(*of)

    async def story(http: Pictured) -> None:
        monkeypatch.setattr(image_store, "pixels", slow)
        asking = asyncio.create_task(http.ask(chat(part(LARGE))))
        assert await asyncio.to_thread(begun.wait, limit(20))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        monkeypatch.setattr(image_store, "pixels", pixels)
        other = asyncio.create_task(http.ask(chat(part(noise(64, 64, 9)))))
        await asyncio.sleep(0.1)
        assert http.submitted.empty(), "no room while the thread may write"
        goes_on.set()
        sent = await http.asked()
        view = SharedPixels(http.pixels_fd).view(sent.images[0].offset, 64, 64)
        assert np.array_equal(view, np.asarray(noise(64, 64, 9)))
        http.send(sent.id, [65])
        release(http, sent)
        assert (await other).status_code == 200

    play(image_model, story, pages=5)


def test_a_body_is_not_counted_for_images_that_are_decoded(image_model: Path) -> None:
    async def story(http: Pictured) -> None:
        file = noise(200, 200, 3)  # 120 KB, of which 12 are kept
        asking = asyncio.create_task(http.ask(chat(part(file))))
        await http.asked()
        assert http.admission.totals[BODY_BYTES] == 0
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        large = chat(text("x" * (5 << 20)))
        assert (await http.ask(large)).status_code == 413
        assert http.admission.totals[BODY_BYTES] == 0

    play(image_model, story, image_body_bytes=4 << 20)


def test_gemma_s_mark_of_an_image_becomes_what_its_processor_makes_of_it(
    make_chat: Callable[..., ChatTokens], tmp_path: Path
) -> None:
    """The line breaks join those of the text: that is tokenised as a whole."""
    names = ("<boi>", "<soft>", "<eoi>")
    template = "{% for m in messages %}<|start|>u\n{% for c in m.content %}{% if c.text %}"
    template += "{{ c.text }}{% else %}<boi>{% endif %}{% endfor %}{% endfor %}"
    chat = make_chat(template, *(AddedToken(name, special=True) for name in names))
    ids = [chat._tokens.special[name] for name in names]
    fields = dict(
        zip(("boi_token_index", "image_token_index", "eoi_token_index"), ids, strict=True)
    )
    (tmp_path / "config.json").write_text(json.dumps(fields))
    token = read_token(tmp_path, chat._tokens)
    parts = [{"type": "image"}, {"type": "text", "text": "\na<boi>b"}]
    rendered = chat.render([{"role": "user", "content": parts}], Asked())
    got = chat.tokenise(token.written(rendered), 1000)
    theirs = chat._tokens.encode("<|start|>u\n\n\n<boi><soft><eoi>\n\n\na")
    assert got[: len(theirs)] == theirs and got.count(ids[0]) == 1, "a client's is text"
    assert chat._tokens.decode(got[len(theirs) :]) == "<boi>b"
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelInvalid, match="image_token_id: expected the id"):
        read_token(tmp_path, chat._tokens)
