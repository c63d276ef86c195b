"""Images in /v1/responses and /v1/messages: sent on as a chat's, and refused by these APIs' own
fields."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from image_chats import TEMPLATE, chat, messages, part, responses, text
from image_files import noise, saved
from image_kit import IMAGE, LARGE, Pictured, play, release

from kvline_server.http.body import MAX_BODY_BYTES
from kvline_server.http.protocol.messages import ImagePart
from kvline_server.http.protocol.responses import ResponsesRequest
from kvline_server.http.protocol.strict import parse
from kvline_server.http.responses_request import to_chat
from kvline_server.ipc.messages import Submit
from kvline_server.ipc.totals import BODY_BYTES, DECODE_BYTES, SEQUENCES

Fields = dict[str, Any]


Form = Callable[..., tuple[str, Fields]]
BOTH = pytest.mark.parametrize("form", [responses, messages])


async def answered(http: Pictured, path: str, body: Fields) -> tuple[Submit, str]:
    asking = asyncio.create_task(http.http.post(path, json=body))
    sent = await http.asked()
    http.send(sent.id, [65])
    answer = await asking
    assert answer.status_code == 200, answer.text
    release(http, sent)
    return sent, answer.text


def of(sent: Submit) -> Any:
    return sent.tokens, [(i.start, i.rows, i.columns, i.digest) for i in sent.images]


@BOTH
def test_images_and_texts_are_those_of_the_same_chat(image_model: Path, form: Form) -> None:
    async def story(http: Pictured) -> None:
        parts = [text("A"), part(IMAGE), text("B"), part(LARGE, "JPEG"), text("")]
        path = "/v1/chat/completions"
        same, _ = await answered(http, path, chat(*parts))
        sent, whole = await answered(http, *form(*parts))
        assert of(sent) == of(same) and len(sent.images) == 2
        usage = json.loads(whole)["usage"]
        if form is responses:
            assert usage["input_tokens"] == len(sent.tokens)
            assert usage["input_tokens_details"]["image_tokens"] == 6 + 64
        else:
            assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(sent.tokens)
        _, events = await answered(http, *form(*parts, stream=True))
        *_, last = (json.loads(e) for e in re.findall(r"^data: (.*\"usage\":\{.*)$", events, re.M))
        streamed = last["response"]["usage"] if form is responses else last["usage"]
        assert streamed == usage
        alone, whole = await answered(http, *form(text("A"), text("B")))
        assert not alone.images and "image_tokens" not in whole
        assert http.store.decoded == 2, "a file that comes by another API is the same"

    play(image_model, story)


@BOTH
def test_a_tool_s_result_may_have_images(image_model: Path, form: Form) -> None:
    async def story(http: Pictured) -> None:
        result = [text("seen:"), part(IMAGE)]
        body = chat(text("A"), part(LARGE))
        tool = {"role": "tool", "tool_call_id": "c1", "content": result}
        body["messages"].insert(1, tool)
        same, _ = await answered(http, "/v1/chat/completions", body)
        sent, _ = await answered(http, *form(text("A"), part(LARGE), result=result))
        assert of(sent) == of(same) and len(sent.images) == 2

    play(image_model, story)


@pytest.mark.parametrize("texts", [0, 1023])
def test_a_result_that_failed_begins_with_it(image_model: Path, texts: int) -> None:
    """Though it has as many parts as a message may have."""

    async def story(http: Pictured) -> None:
        own = [text("b")] * texts
        path, body = messages(text("A"), result=[*own, part(IMAGE)])
        body["messages"][0]["content"][0]["is_error"] = True
        sent, _ = await answered(http, path, body)
        whole = [text("Error: " + "b" * texts), part(IMAGE)]
        same, _ = await answered(http, *messages(text("A"), result=whole))
        assert of(sent) == of(same)

    play(image_model, story)


@pytest.mark.parametrize("detail", ["low", "high", "auto", "original"])
def test_detail_is_the_chat_s(detail: str) -> None:
    """`original` is at most the model's limit, as `high` is."""
    _, body = responses(part(IMAGE, detail=detail))
    [_, user] = to_chat(parse(ResponsesRequest, body))[0].messages
    assert isinstance(user.content, list) and isinstance(user.content[0], ImagePart)
    assert user.content[0].image_url.detail == ("high" if detail == "original" else detail)


HTTP = {"type": "image_url", "image_url": {"url": "https://a.example/b.png"}}
REFUSED = [
    (
        responses,
        HTTP,
        "image_url: expected a URL such as data:image/png;base64,iVBORw0..., got one",
    ),
    (responses, part(b"GIF"), "image_url: expected a PNG, JPEG, WebP or GIF"),
    (responses, part(IMAGE, detail="medium"), "detail: Input should be"),
    (responses, part(noise(2, 700)), "image_url: expected sides of a ratio of at most 200"),
    (responses, part(saved(LARGE, "PNG")[:-600]), "image_url: expected a whole PNG"),
    (messages, part(b"GIF"), "source: expected a PNG, JPEG, WebP or GIF"),
    (messages, part(noise(2, 700)), "source: expected sides of a ratio of at most 200"),
    (messages, part(saved(LARGE, "PNG")[:-600]), "source: expected a whole PNG"),
    (messages, part(IMAGE, "BMP"), "source.media_type: Input should be"),
    (
        messages,
        part(saved(IMAGE, "PNG"), "JPEG"),
        "source.media_type: must be image/png",
    ),
]


@BOTH
def test_a_wrong_image_is_a_400_with_its_own_place(image_model: Path, form: Form) -> None:
    """In a user's message, and in a tool's result."""
    if form is responses:
        of_user, result = "input[0].content[1]", "input[0].output[1]"
    else:
        of_user, result = "messages[0].content[1]", "messages[0].content[0].content[1]"

    async def story(http: Pictured) -> None:
        for _, wrong, named in (each for each in REFUSED if each[0] is form):
            given = [text("a"), wrong]
            for place, (path, body) in (
                (of_user, form(*given)),
                (result, form(text("b"), result=given)),
            ):
                answer = await http.http.post(path, json=body)
                error = answer.json()["error"]
                assert answer.status_code == 400, answer.text
                assert error["message"].startswith(f"{place}.{named}"), error["message"]
                if form is responses:
                    assert error["param"] == error["message"].partition(":")[0]
        assert http.submitted.empty()
        await http.settled()
        held = (http.admission.totals[kind] for kind in (SEQUENCES, BODY_BYTES, DECODE_BYTES))
        assert list(held) == [0, 0, 0]

    play(image_model, story)


@BOTH
def test_bounds_of_a_request_name_its_field(image_model: Path, form: Form) -> None:
    field = "input" if form is responses else "messages"

    async def story(http: Pictured) -> None:
        async def refusal(*parts: Fields, **more: Any) -> str:
            path, body = form(*parts, **more)
            answer = await http.http.post(path, json=body)
            assert answer.status_code == 400, answer.text
            return str(answer.json()["error"]["message"])

        counted = await refusal(*[part(IMAGE), text("a")] * 3, result=[part(IMAGE)] * 2)
        assert counted.startswith(f"{field}: expected at most 4 images in a request, got 5")
        assert "at most 4 images" in await refusal(*[part(IMAGE), text("a")] * 40)
        http.service.generator.images = None
        own = f"{field}[0].content[1]." + ("image_url" if form is responses else "source")
        assert (await refusal(text("a"), part(IMAGE))).startswith(f"{own}: this server takes text")

    play(image_model, story)


@pytest.fixture
def templated(image_model: Path, tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """The model with another chat template."""

    def made(template: str) -> Path:
        folder = shutil.copytree(image_model, tmp_path / str(len(template)))
        file = folder / "tokenizer_config.json"
        settings = json.loads(file.read_text())
        file.write_text(json.dumps(settings | {"chat_template": template}))
        return folder

    yield made


@pytest.mark.parametrize(
    ("written", "why"),
    [("{{ m.content }}", "writes no images"), ("{{ 'r: ' + m.content }}", "failed in line 2")],
)
def test_a_template_that_takes_no_images_of_tools_names_one(
    templated: Callable[[str], Path], written: str, why: str
) -> None:
    of_tool = "{% if m.role == 'tool' %}" + written + "{% else %}"
    start = "<|start|>{{ m.role }}\n"
    template = TEMPLATE.replace(start, start + of_tool)
    template = template.replace(
        "{% endfor %}{% endif %}<|end|>", "{% endfor %}{% endif %}{% endif %}<|end|>"
    )

    async def story(http: Pictured) -> None:
        result = [text("seen:"), part(IMAGE)]
        body = chat(text("a"))
        body["messages"].append({"role": "tool", "tool_call_id": "c1", "content": result})
        _, asked = messages(text("a"), result=result)
        counted = {name: asked[name] for name in ("model", "messages", "system")}
        for (path, given), place in (
            (("/v1/chat/completions", body), "messages[2].content[1].image_url"),
            (("/tokenize", {"messages": body["messages"]}), "messages[2].content[1].image_url"),
            (responses(text("a"), result=result), "input[0].output[1].image_url"),
            (("/v1/messages", asked), "messages[0].content[0].content[1].source"),
            (("/v1/messages/count_tokens", counted), "messages[0].content[0].content[1].source"),
        ):
            answer = await http.http.post(path, json=given)
            assert answer.status_code == 400, answer.text
            message = answer.json()["error"]["message"]
            assert message.startswith(f"{place}: ") and why in message, message
            assert message.endswith("send them in a user's message")

    play(templated(template), story)


def test_tokens_of_images_are_counted_in_bodies_beyond_those_of_texts(image_model: Path) -> None:
    async def story(http: Pictured) -> None:
        parts = [part(noise(900, 900, 2)), text("a")]
        path, body = messages(*parts)
        assert len(json.dumps(body)) > MAX_BODY_BYTES
        sent, _ = await answered(http, path, body)
        for name in ("max_tokens", "temperature"):
            del body[name]
        counted = await http.http.post("/v1/messages/count_tokens", json=body)
        assert counted.json() == {"input_tokens": len(sent.tokens)}
        given = await http.http.post("/tokenize", json={"messages": chat(*parts)["messages"]})
        assert given.json()["tokens"] == sent.tokens

    play(image_model, story)
