"""A real server with its processes that sees images: answers of transformers, bounds, and memory
that is given back."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from families import reference
from image_chats import PAD, TEMPLATE, chat, messages, part, responses, text
from image_files import noise
from servers import Server, serving
from tokenizers import Tokenizer
from waiting import limit

from kvline_contract.launch import EngineOptions, Images

pytestmark = pytest.mark.process

QUESTION = [{"role": "system", "content": "See."}]


OPTIONS = EngineOptions(
    max_model_len=256,
    max_running_requests=4,
    max_prefill_tokens=96,
    images=Images.REQUIRED,
    max_image_patches=256,
    max_images_per_request=3,
)
PARTS = {"tower", "encoder-work", "encoder-cache"}


@pytest.fixture(scope="module")
def seeing(image_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(Server(image_model, tmp_path_factory.mktemp("seeing"), OPTIONS)) as made:
        yield made


def ask(server: Server, *parts: dict[str, Any], **more: Any) -> Any:
    body = chat(*parts, logprobs=True, **more)
    return server.client.post(f"{server.url}/v1/chat/completions", json=body, timeout=limit(60))


def logprobs(answer: Any) -> list[float]:
    """Of the tokens of its only choice."""
    (choice,) = answer.json()["choices"]
    return [each["logprob"] for each in choice["logprobs"]["content"]]


@torch.inference_mode()
def expected(folder: Path, parts: list[Any], count: int = 4) -> list[float]:
    """Logprobs of transformers' greedy tokens."""
    import jinja2
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    written = [{"type": "image"} if p["type"] == "image_url" else p for p in parts]
    messages = [*QUESTION, {"role": "user", "content": written}]
    prompt = jinja2.Template(TEMPLATE, keep_trailing_newline=True).render(
        messages=messages, add_generation_prompt=True
    )
    ids, image = tokenizer.encode(prompt).ids, int(tokenizer.token_to_id(PAD) or 0)
    raw = json.loads((folder / "preprocessor_config.json").read_text())
    raw.pop("image_processor_type")
    processor: Any = Qwen2VLImageProcessorPil(**raw)
    given = processor([_drawn(p) for p in parts if p["type"] == "image_url"], return_tensors="pt")
    counts = iter((given["image_grid_thw"].prod(dim=1) // 4).tolist())
    ids = [each for id in ids for each in ([image] * next(counts) if id == image else [id])]
    model, found = reference(folder), []
    for _ in range(count):
        tokens = torch.tensor([ids])
        types = torch.eq(tokens, image).int()
        logits = model(input_ids=tokens, mm_token_type_ids=types, **given).logits[0, -1]
        ids.append(int(logits.argmax()))
        found.append(float(logits.log_softmax(dim=-1).max()))
    return found


def _drawn(part: dict[str, Any]) -> Any:
    import io

    from PIL import Image

    data = part["image_url"]["url"].partition(",")[2]
    return Image.open(io.BytesIO(base64.b64decode(data)))


def test_answers_are_those_of_transformers_and_only_the_same_picture_is_cached(
    seeing: Server, image_model: Path
) -> None:
    first, second = part(noise(40, 56, 1)), part(noise(40, 56, 2))
    cached = []
    for own in (first, second, first):
        parts = [text("What is "), own, text(" and "), part(noise(17, 90, 3)), text("?")]
        answer = ask(seeing, *parts)
        assert answer.status_code == 200, answer.text
        assert logprobs(answer) == pytest.approx(expected(image_model, parts), abs=1e-3)
        details = answer.json()["usage"]["prompt_tokens_details"]
        assert details["image_tokens"] == 5 * 7 + 2 * 11
        cached.append(details["cached_tokens"])
    assert cached[0] == 0 and cached[1] == 16 and cached[2] >= 64
    seeing.rests()


def test_a_stream_and_several_choices_have_one_picture(seeing: Server) -> None:
    whole = ask(seeing, part(noise(24, 24, 4)), text("a"), n=2)
    assert whole.status_code == 200, whole.text
    one, other = (c["message"]["content"] for c in whole.json()["choices"])
    assert one == other
    streamed = ask(seeing, part(noise(24, 24, 4)), text("a"), stream=True)
    lines = re.findall(r"^data: (\{.*)$", streamed.text, re.M)
    deltas = [c["delta"].get("content") or "" for x in lines for c in json.loads(x)["choices"]]
    assert "".join(deltas) == one
    seeing.rests()


def test_other_apis_answer_as_the_chat_does(seeing: Server) -> None:
    """OpenAI's client by /v1/responses; of /v1/messages its bodies, as its client is elsewhere."""
    parts = [text("What is "), part(noise(40, 56, 6)), text("?")]
    chats = ask(seeing, *parts, ignore_eos=False).json()
    [choice], used = chats["choices"], chats["usage"]
    base = f"{seeing.url}/v1"
    client: Any = openai.OpenAI(base_url=base, api_key="none", max_retries=0, timeout=limit(60))
    body = responses(*parts)[1] | {"include": ["message.output_text.logprobs"]}
    whole = client.responses.create(**body)
    *_, last = client.responses.create(**body, stream=True)
    [output] = whole.output[0].content
    assert whole.output_text == last.response.output_text == choice["message"]["content"]
    theirs = [each["logprob"] for each in choice["logprobs"]["content"]]
    assert len(theirs) == used["completion_tokens"] > 1
    assert [each.logprob for each in output.logprobs] == pytest.approx(theirs, abs=1e-3)
    for usage in (whole.usage, last.response.usage):
        assert usage.input_tokens == used["prompt_tokens"]
        assert usage.input_tokens_details.image_tokens == 5 * 7
    address = [{"type": "input_image", "image_url": "https://example.com/a.png", "detail": "auto"}]
    with pytest.raises(openai.BadRequestError, match="fetches nothing") as refused:
        client.responses.create(**body | {"input": [{"role": "user", "content": address}]})
    assert refused.value.param == "input[0].content[0].image_url"

    path, asked = messages(*parts)
    answer = seeing.client.post(seeing.url + path, json=asked, timeout=limit(60)).json()
    assert "".join(b["text"] for b in answer["content"]) == choice["message"]["content"]
    usage = answer["usage"]
    counted = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert (counted, usage["output_tokens"]) == (used["prompt_tokens"], used["completion_tokens"])
    stream = {**asked, "stream": True}
    events = seeing.client.post(seeing.url + path, json=stream, timeout=limit(60)).text
    deltas = re.findall(r"^data: (\{.*text_delta.*)$", events, re.M)
    texts = [json.loads(delta)["delta"]["text"] for delta in deltas]
    assert "".join(texts) == choice["message"]["content"]
    seeing.rests()


def test_what_is_refused_names_the_part_and_nothing_is_held(seeing: Server) -> None:
    picture = part(noise(24, 24, 4))
    address = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    for parts, why in (
        ([address], r"messages\[1\]\.content\[0\]\.image_url: .*data:"),
        ([text("a"), part(b"no image")], r"messages\[1\]\.content\[1\]\.image_url"),
        ([picture] * 4, "at most 3 images"),
    ):
        answer = ask(seeing, *parts)
        assert answer.status_code == 400 and re.search(why, answer.json()["error"]["message"])
    seeing.rests()


def test_the_report_has_the_encoders_parts_and_bounds(seeing: Server) -> None:
    report = seeing.probe("/sizing?version=3")[1]
    names = {part["name"] for part in report["result"]["ranks"][0]["parts"]}
    assert names >= PARTS
    bounds = report["effective"]["maxImagesPerRequest"], report["effective"]["maxImagePatches"]
    assert bounds == (3, 256)
    stages = {stage["name"]: stage for stage in report["stages"]}
    assert stages["encoder"]["detail"] == "images of up to 256 patches"


def test_pictures_of_distinct_sizes_take_no_memory(seeing: Server) -> None:
    """The first of each size may: what the encoder's largest passes took is theirs."""
    pid = seeing.children()["engine"]

    def resident() -> int:
        lines = Path(f"/proc/{pid}/status").read_text()
        found = re.search(r"RssAnon:\s+(\d+)", lines)
        assert found is not None
        return int(found[1]) << 10

    rng = np.random.default_rng(5)
    sizes = rng.integers(8, 128, (120, 2)).tolist()
    for at, (height, width) in enumerate(sizes):
        if at == 20:
            before = resident()
        answer = ask(seeing, part(noise(height, width, at)), text("a"), max_tokens=1)
        assert answer.status_code == 200, answer.text
    assert resident() - before < 24 << 20
    seeing.rests()


def test_two_ranks_answer_as_transformers_and_each_has_the_encoders_parts(
    image_model: Path, tmp_path: Path
) -> None:
    """Pictures in the memory of two HTTP processes, several in a pass and many at once."""
    two = Server(image_model, tmp_path, OPTIONS, gpus=2, http_processes=2)
    with serving(two) as server, ThreadPoolExecutor(4) as pool:
        asked = [
            [part(noise(40, 56, seed)), text(" or "), part(noise(17, 90, seed + 9)), text("?")]
            for seed in range(4)
        ]
        for own, answer in zip(asked, pool.map(lambda own: ask(server, *own), asked), strict=True):
            assert answer.status_code == 200, answer.text
            assert logprobs(answer) == pytest.approx(expected(image_model, own), abs=1e-3)
        ranks = server.probe("/sizing?version=3")[1]["result"]["ranks"]
        parts = [{part["name"]: part["mib"] for part in rank["parts"]} for rank in ranks]
        assert [each.keys() >= PARTS for each in parts] == [True, True]
        assert len({each["encoder-work"] for each in parts}) == 1
        server.rests()
