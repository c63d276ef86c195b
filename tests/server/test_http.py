"""The public port over a real server: what is answered, and how everything bad is refused.

Ids are those of the reliability catalogue. Every refusal is an OpenAI error body of at most 1 KB
that names the field and repeats nothing of the input.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from drawn import firm
from servers import Server, wait_for
from waiting import limit

from kvline_contract.launch import ToolCallParser
from kvline_server.http.completions import seeded
from kvline_server.ipc.sampling_params import SamplingParams

pytestmark = pytest.mark.process
TOOL = {"type": "function", "function": {"name": "f"}}
LEAVES = 0.3  # seconds after which a client has left

CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 3,
}
COMPLETION = {"model": "tiny", "prompt": "hello", "max_tokens": 3}
# Texts are compared of those whose answers no rounding changes: a second time they are computed in
# another batch, or behind what the prefix cache has.
WORDS = ("hello", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def post(server: Server, body: Any, path: str = "/v1/completions", **more: Any) -> httpx.Response:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json", **more.pop("headers", {})}
    return httpx.post(
        f"{server.url}{path}", content=raw, headers=headers, timeout=limit(30), **more
    )


def refused(answer: httpx.Response, status: int, named: str = "") -> None:
    assert answer.status_code == status, answer.text
    assert len(answer.content) <= 1024
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert named in error["message"], error
    assert "Traceback" not in answer.text


# What works -----------------------------------------------------------------------------------


def test_the_openai_client_chats(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2, temperature=0)
    choice = answer.choices[0]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 3
    assert [len(c.top_logprobs) for c in choice.logprobs.content] == [2, 2, 2]
    assert choice.logprobs.content[0].top_logprobs[0].logprob <= 0


def test_a_stream_has_the_content_of_the_whole_answer(
    client: openai.OpenAI, tiny_model: Path
) -> None:
    word = next(firm(tiny_model, WORDS, SamplingParams(3, temperature=0.0), chat=True))
    asked = CHAT | {"messages": [{"role": "user", "content": word}], "temperature": 0}
    whole = client.chat.completions.create(**asked)
    pieces = client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(pieces)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3
    assert chunks[-2].choices[0].finish_reason == "length"


def test_lists_of_prompts_and_choices_come_in_order(
    client: openai.OpenAI, tiny_model: Path
) -> None:
    one, two, *_ = firm(tiny_model, WORDS, SamplingParams(4, temperature=0.0))
    answer = client.completions.create(
        model="tiny", prompt=[one, two, one], n=2, max_tokens=4, temperature=0
    )
    texts = [c.text for c in answer.choices]
    assert [c.index for c in answer.choices] == list(range(6))
    assert texts[0] == texts[1] == texts[4] == texts[5]
    ids = client.completions.create(
        model="tiny", prompt=[[10, 20], [30]], max_tokens=2, temperature=0
    )
    assert len(ids.choices) == 2


def test_a_seed_repeats_and_choices_of_it_differ(client: openai.OpenAI, tiny_model: Path) -> None:
    choices = [seeded(SamplingParams(12, seed=11), choice) for choice in range(3)]
    word = next(firm(tiny_model, WORDS, *choices))

    def ask() -> list[str]:
        answer = client.completions.create(
            model="tiny", prompt=word, n=3, max_tokens=12, seed=11, temperature=1
        )
        return [c.text for c in answer.choices]

    one, two = ask(), ask()
    assert one == two
    assert len(set(one)) == 3


def test_echo_scores_the_prompt_without_generating(client: openai.OpenAI) -> None:
    """H19."""
    answer = client.completions.create(
        model="tiny", prompt="hello", max_tokens=0, echo=True, logprobs=2
    )
    choice = answer.choices[0]
    assert choice.text == "hello"
    assert choice.logprobs is not None
    scored: list[Any] = choice.logprobs.token_logprobs or []
    assert scored[0] is None
    assert len(scored) == 5
    assert choice.logprobs.text_offset == [0, 1, 2, 3, 4]
    bare = client.completions.create(model="tiny", prompt="hello", max_tokens=0, echo=True)
    assert bare.choices[0].text == "hello"
    assert bare.choices[0].logprobs is None


@pytest.mark.parametrize("top", [0, 20])
def test_prompt_logprobs_have_an_entry_a_token(server: Server, top: int) -> None:
    """H18."""
    answer = post(server, {**COMPLETION, "prompt_logprobs": top}).json()
    entries = answer["choices"][0]["prompt_logprobs"]
    assert entries[0] is None
    assert len(entries) == 5
    assert all(max(top, 1) <= len(e) <= top + 1 for e in entries[1:])
    chat = post(server, {**CHAT, "prompt_logprobs": top}, "/v1/chat/completions").json()
    assert chat["prompt_logprobs"][0] is None


def test_echoed_and_generated_logprobs_join(server: Server) -> None:
    answer = post(server, {**COMPLETION, "echo": True, "logprobs": 1, "temperature": 0}).json()
    logprobs = answer["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == 5 + 3
    assert logprobs["top_logprobs"][0] is None


def test_a_second_time_the_prompt_comes_from_the_cache(server: Server) -> None:
    body = {**COMPLETION, "prompt": "x" * 70}
    used = [post(server, body).json()["usage"] for _ in range(2)]
    assert used[1]["prompt_tokens_details"]["cached_tokens"] == 64


def test_only_requests_of_one_salt_share_the_cache(server: Server) -> None:
    body = {**COMPLETION, "prompt": "a salted prompt " * 5}

    def cached(**more: str) -> int:
        used = post(server, {**body, **more}).json()["usage"]
        return int(used["prompt_tokens_details"]["cached_tokens"])

    assert [cached(cache_salt="one"), cached(cache_salt="one")] == [0, 64]
    assert [cached(cache_salt="two"), cached(), cached(cache_salt="two"), cached()] == [
        0,
        0,
        64,
        64,
    ]
    assert cached(prompt_cache_key="other") == 64, "a label changes nothing"


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]


def test_exactly_the_context_fits(server: Server) -> None:
    """H22."""
    body = {**COMPLETION, "prompt": [5] * 250, "max_tokens": 6, "ignore_eos": True}
    answer = post(server, body)
    assert answer.json()["usage"]["completion_tokens"] == 6
    for asked in (7, 32_000):  # agents ask every model for so many
        answer = post(server, {**body, "max_tokens": asked})
        assert answer.json()["usage"]["completion_tokens"] == 6
        assert answer.json()["choices"][0]["finish_reason"] == "length"
    for length in (256, 257):
        refusal = post(server, {**body, "prompt": [5] * length})
        refused(refusal, 400, "prompt")
        assert refusal.json()["error"]["code"] == "context_length_exceeded"


def test_a_chat_that_names_no_number_has_the_service_s(server: Server) -> None:
    body = {key: value for key, value in CHAT.items() if key != "max_tokens"}
    answer = post(server, {**body, "ignore_eos": True}, "/v1/chat/completions").json()
    assert answer["usage"]["completion_tokens"] == server.engine.default_max_tokens


def test_stop_strings_are_never_sent(server: Server, tiny_model: Path) -> None:
    """H31, over a real stream: what comes out is the whole answer up to the stop."""
    body = {**COMPLETION, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    params = SamplingParams(40, temperature=0.0, ignore_eos=True)
    body["prompt"] = next(firm(tiny_model, WORDS, params))
    whole = post(server, body).json()["choices"][0]["text"]
    stop = whole[6:9]
    cut = post(server, {**body, "stop": [stop]}).json()["choices"][0]
    assert cut["text"] == whole[: whole.index(stop)]
    assert cut["finish_reason"] == "stop"


def test_request_ids_are_unique_and_cleaned(server: Server) -> None:
    """H46."""
    answer = post(server, COMPLETION, headers={"x-request-id": "a b<script>" + "c" * 100})
    shown = answer.headers["x-request-id"]
    assert len(shown) <= 64
    assert " " not in shown and "<" not in shown
    assert shown.startswith("cmpl-abscriptc") and shown == answer.json()["id"]
    ids = {post(server, CHAT, "/v1/chat/completions").json()["id"] for _ in range(3)}
    assert len(ids) == 3 and all(id.startswith("chatcmpl-") for id in ids)


def test_an_answer_names_the_revision_that_gave_it(server: Server) -> None:
    answer = post(server, {**CHAT, "stream": True}, "/v1/chat/completions")
    first = json.loads(answer.text.partition("\n")[0].removeprefix("data: "))
    whole = post(server, COMPLETION).json()
    assert first["system_fingerprint"] == whole["system_fingerprint"] == "fp_abcde"


# What is refused ------------------------------------------------------------------------------

BAD_BODIES = {
    "H01-empty": b"",
    "H01-null": b"null",
    "H01-list": b"[]",
    "H01-text": b'"x"',
    "H01-cut": b'{"model": "tiny", ',
    "H01-bom": b"\xef\xbb\xbf{}",
    "H03-bad-utf8": b'{"model": "\xff"}',
    "H03-utf16": '{"model": "tiny"}'.encode("utf-16"),
    "H04-nesting": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "H05-digits": b'{"n":' + b"9" * 5000 + b"}",
    "H06-nan": b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
    "H06-infinity": b'{"model": "tiny", "prompt": "x", "temperature": Infinity}',
    "H06-1e400": b'{"model": "tiny", "prompt": "x", "temperature": 1e400}',
    "H12-duplicate": b'{"model": "tiny", "prompt": "x", "n": 1, "n": 2}',
    "H14-surrogate": b'{"model": "tiny", "prompt": "\\ud800"}',
}


@pytest.mark.parametrize("name", BAD_BODIES)
def test_what_is_not_strict_json_is_400(server: Server, name: str) -> None:
    refused(post(server, BAD_BODIES[name]), 400)


@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data", ""])
def test_another_content_type_is_415(server: Server, kind: str) -> None:
    """H02."""
    refused(post(server, COMPLETION, headers={"content-type": kind}), 415)


def test_a_large_body_is_413(server: Server) -> None:
    refused(post(server, {**COMPLETION, "prompt": "x" * (2 << 20)}), 413)


@pytest.mark.parametrize(
    "prompt",
    ["word" * (500 << 10), "x" * (1 << 20), " " * (1 << 20), "\U0001f600" * (480 << 10)],
    ids=["one-word", "one-letter", "blanks", "emoji"],
)
def test_a_huge_prompt_is_400_and_delays_no_others(server: Server, prompt: str) -> None:
    """H25: while its length is checked, other requests and probes are answered."""
    raw = json.dumps({**COMPLETION, "prompt": prompt}, ensure_ascii=False).encode()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, server, raw)
        asked = 0
        while asked < 3 or not answer.done():
            assert server.probe("/readyz", timeout=limit(5))[0] == 200
            assert httpx.get(f"{server.url}/v1/models", timeout=limit(5)).status_code == 200
            asked += 1
        refused(answer.result(), 400, "prompt")


BAD_COMPLETIONS: list[tuple[str, dict[str, Any], str]] = [
    ("H13", {"foo": 1}, "foo"),
    ("H13", {"suffix": "x"}, "suffix"),
    ("H13", {"store": "yes"}, "store"),
    ("H13", {"prompt_cache_retention": 24}, "prompt_cache_retention"),
    ("H13", {"client_metadata": {"a": 1}}, "client_metadata"),
    ("H13", {"service_tier": "flex"}, "service_tier"),
    ("H13", {"min_tokens": 2}, "min_tokens"),
    ("H13", {"min_tokens": 4, "ignore_eos": True}, "min_tokens"),
    ("H13", {"length_penalty": True}, "length_penalty"),
    ("H15", {"n": True}, "n"),
    ("H15", {"n": "8"}, "n"),
    ("H15", {"n": 3.5}, "n"),
    ("H16", {"n": 0}, "n"),
    ("H16", {"n": -1}, "n"),
    ("H16", {"n": 9}, "n"),
    ("H16", {"n": 10**30}, "n"),
    ("H16", {"best_of": 2}, "best_of"),
    ("H17", {"logprobs": -1}, "logprobs"),
    ("H17", {"logprobs": 21}, "logprobs"),
    ("H18", {"prompt_logprobs": -1}, "prompt_logprobs"),
    ("H18", {"prompt_logprobs": 21}, "prompt_logprobs"),
    ("H18", {"prompt_logprobs": 10**9}, "prompt_logprobs"),
    ("H18", {"prompt_logprobs": True}, "prompt_logprobs"),
    ("H18", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ("H20", {"max_tokens": 0}, "max_tokens"),
    ("H20", {"max_tokens": -1}, "max_tokens"),
    ("H20", {"max_tokens": 2**63}, "max_tokens"),
    ("H20", {"max_tokens": 9.5}, "max_tokens"),
    ("H20", {"max_tokens": 300, "min_tokens": 256, "ignore_eos": True}, "min_tokens"),
    ("H21", {"prompt": ""}, "prompt"),
    ("H21", {"prompt": []}, "prompt"),
    ("H21", {"prompt": [[]]}, "prompt"),
    ("H21", {"prompt": None}, "prompt"),
    ("H23", {"prompt": [-1]}, "prompt"),
    ("H23", {"prompt": [307]}, "prompt"),
    ("H23", {"prompt": [1.5]}, "prompt"),
    ("H23", {"prompt": [True, 5]}, "prompt"),
    ("H23", {"prompt": [5] * 100_000}, "prompt"),
    ("H23", {"prompt_embeds": "x"}, "prompt_embeds"),
    ("H24", {"prompt": ["x"] * 10_000}, "prompt"),
    ("H26", {"temperature": -1}, "temperature"),
    ("H26", {"temperature": 100}, "temperature"),
    ("H26", {"top_p": 0}, "top_p"),
    ("H26", {"top_p": 1.01}, "top_p"),
    ("H26", {"top_k": -2}, "top_k"),
    ("H26", {"top_k": 10**9}, "top_k"),
    ("H27", {"presence_penalty": 2.01}, "presence_penalty"),
    ("H27", {"frequency_penalty": -2.01}, "frequency_penalty"),
    ("H27", {"repetition_penalty": 0}, "repetition_penalty"),
    ("H28", {"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
    ("H28", {"logit_bias": {"307": 1}}, "logit_bias"),
    ("H28", {"logit_bias": {"5": 1000}}, "logit_bias"),
    ("H28", {"logit_bias": {"x": 1}}, "logit_bias"),
    ("H30", {"stop": ["x"] * 17}, "16"),
    ("H30", {"stop": [""]}, "stop"),
    ("H30", {"stop": "x" * 257}, "stop"),
    ("H32", {"seed": -(2**63) - 1}, "seed"),
    ("H32", {"seed": 2**64}, "seed"),
    ("H32", {"seed": 1.5}, "seed"),
    ("H33", {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ("H34", {"guided_regex": "foo**"}, "guided_regex"),
    ("H48", {"user": "x" * 1_000_000}, "user"),
    ("H49", {"stream_options": {"include_usage": 1}}, "stream_options"),
    ("H49", {"stream": True, "stream_options": 5}, "stream_options"),
    ("H49", {"stream_options": {"other": True}}, "stream_options"),
    ("H49", {"stream": True, "stream_options": {"include_obfuscation": True}}, "include_obfusc"),
    ("H24", {"prompt": ["x"] * 128, "n": 2}, "prompts times n"),
]


@pytest.mark.parametrize(
    ("id", "change", "named"), BAD_COMPLETIONS, ids=lambda v: v if isinstance(v, str) else ""
)
def test_a_bad_completion_names_its_field(
    server: Server, id: str, change: dict[str, Any], named: str
) -> None:
    refused(post(server, {**COMPLETION, **change}), 400, named)


BAD_CHATS: list[tuple[str, dict[str, Any], str]] = [
    ("H17", {"top_logprobs": 5}, "top_logprobs"),
    ("H17", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ("H18", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ("H20", {"max_tokens": 0}, "max_tokens"),
    ("H21", {"messages": []}, "messages"),
    ("H33", {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ("H35", {"tools": [{"type": "function"}]}, "tools"),
    ("H35", {"tool_choice": "required"}, "tool_choice"),
    ("H35", {"modalities": ["text", "audio"]}, "modalities"),
    ("H20", {"max_completion_tokens": 4}, "max_tokens"),
    ("H48", {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ("H48", {"messages": [{"role": "user"}]}, "messages[0].content"),
    (
        "H35",
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]},
        "messages[0].tool_calls",
    ),
    ("H48", {"messages": [{"role": "assistant", "refusal": "no"}]}, "messages[0].refusal"),
    ("H36", {"chat_template": "{{ 1 }}"}, "chat_template"),
    ("H36", {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs: 'messages'"),
    ("H48", {"messages": [{"role": "tool", "content": "x"}]}, "tool_call_id"),
    ("H48", {"messages": [{"role": "function", "content": "x"}]}, "role"),
    (
        "H35",
        {"tools": [TOOL], "tool_choice": "required"},
        "tools: this model's chat template takes no tools",
    ),
    (
        "H35",
        {"tools": [TOOL], "tool_choice": "none"},
        "tools: the chat template does not read them",
    ),
    ("H33", {"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs.regex"),
    ("H48", {"messages": [{"role": "user", "content": "x"}] * 5000}, "messages"),
    (
        "H37",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x"}}
                    ],
                }
            ]
        },
        "messages[0].content[0].image_url: this server takes text alone",
    ),
    (
        "H37",
        {
            "messages": [
                {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "x"}}]}
            ]
        },
        "input_audio is not supported here; only text and image_url parts are taken",
    ),
]


@pytest.mark.parametrize(
    ("id", "change", "named"), BAD_CHATS, ids=lambda v: v if isinstance(v, str) else ""
)
def test_a_bad_chat_names_its_field(
    server: Server, id: str, change: dict[str, Any], named: str
) -> None:
    refused(post(server, {**CHAT, **change}, "/v1/chat/completions"), 400, named)


def test_special_tokens_in_a_message_are_plain_text(server: Server) -> None:
    """H38: tokenised by its letters, not as one special token."""

    def prompt_tokens(content: str) -> int:
        body = {**CHAT, "messages": [{"role": "user", "content": content}]}
        return int(post(server, body, "/v1/chat/completions").json()["usage"]["prompt_tokens"])

    empty = prompt_tokens("a") - 1
    assert prompt_tokens("<|start|>system") == empty + len("<|start|>system")


def test_a_message_is_continued_and_a_template_gets_what_it_asks_for(server: Server) -> None:
    def prompt_tokens(**more: Any) -> int:
        messages = [*CHAT["messages"], {"role": "assistant", "content": "Once"}]
        answer = post(server, {**CHAT, "messages": messages, **more}, "/v1/chat/completions")
        return int(answer.json()["usage"]["prompt_tokens"])

    whole = prompt_tokens(chat_template_kwargs={"unused": [1]}, documents=[])
    assert whole == prompt_tokens(add_generation_prompt=True)
    closed = prompt_tokens(add_generation_prompt=False)
    assert whole - closed == len("sassistant\n")  # <|start|> is one
    assert closed - prompt_tokens(continue_final_message=True) == len("e\n")  # and so is <|end|>


def test_an_invalid_template_costs_chat_and_not_the_start(
    start: Callable[..., Server], tiny_model: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "chat_template.jinja").write_text("{% for m in messages %}")
    server = start(model=model)
    server.wait()
    reason = "the chat template is invalid in line 1"
    refused(post(server, CHAT, "/v1/chat/completions"), 400, reason)
    assert post(server, COMPLETION).status_code == 200
    assert any(reason in warning for warning in server.sizing()["warnings"])


def test_calls_in_a_form_that_no_parser_knows_are_a_warning_until_one_is_named(
    start: Callable[..., Server], tiny_model: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "chat_template.jinja").write_text("{{ tools }}<arg_key>")

    def of_tools(server: Server) -> list[str]:
        server.wait()
        return [text for text in server.sizing()["warnings"] if text.startswith("tools")]

    server = start(model=model)
    (warning,) = of_tools(server)
    assert warning.startswith("tools are refused: this model's chat template writes tool calls in ")
    assert warning.endswith("spec.engine.toolCallParser names one")
    named = replace(server.engine, tool_call_parser=ToolCallParser.HERMES)
    server = start(model=model, scratch=tmp_path / "named", engine=named)
    assert of_tools(server) == []


def test_a_model_without_a_tokenizer_serves_token_ids_and_warns(
    start: Callable[..., Server], tiny_model: Path, tmp_path: Path
) -> None:
    """A copy that was cut off, for all that one can tell."""
    model = shutil.copytree(tiny_model, tmp_path / "model")
    (model / "tokenizer.json").unlink()
    server = start(model=model)
    server.wait()
    refused(post(server, COMPLETION), 400, "no tokenizer is loaded")
    assert post(server, {**COMPLETION, "prompt": [1, 2, 3]}).status_code == 200
    assert any("has no tokenizer.json" in warning for warning in server.sizing()["warnings"])


@pytest.mark.parametrize("model", ["unknown", "../../etc/passwd", "x" * 512])
def test_an_unknown_model_is_404(server: Server, model: str) -> None:
    """H39."""
    refused(post(server, {**COMPLETION, "model": model}), 404, "tiny")


@pytest.mark.parametrize(
    "path",
    [
        "/docs",
        "/openapi.json",
        "/metrics",
        "/invocations",
        "/pause",
        "/update_weights",
        "/server_info",
        "/readyz",
        "/sizing",
        "/",
        "/v1",
        "/V1/models",
        "//v1/models",
        "/v1/completions/",
        "/v1/models/",
        "/health/x",
        "/tokenize/x",
        "/v1/tokenize",
        "/v1/embeddings",
        "/rerank",
    ],
)
def test_only_routes_of_the_page_exist_on_the_api_port(server: Server, path: str) -> None:
    """H40, H42."""
    refused(httpx.get(f"{server.url}{path}", timeout=limit(5)), 404)


@pytest.mark.parametrize("method", ["GET", "PUT", "HEAD", "TRACE", "DELETE"])
def test_another_method_is_405(server: Server, method: str) -> None:
    """H45."""
    answer = httpx.request(method, f"{server.url}/v1/completions", timeout=limit(5))
    assert answer.status_code == 405


# Clients that leave, queues that fill ------------------------------------------------------------


def gave_back(server: Server, before: dict[str, float]) -> None:
    """One more request was left, none more came to its end, and its pages are back."""
    server.ended(lambda ends: ends["aborted"] > before["aborted"])
    server.rests()
    assert server.ends()["finished"] == before["finished"]


LONG = {**COMPLETION, "max_tokens": 240, "ignore_eos": True}


def test_leaving_a_stream_frees_its_pages(server: Server) -> None:
    """F44: pages are back within 20 s of a stream's end."""
    server.rests()
    before = server.ends()
    with httpx.stream(
        "POST",
        f"{server.url}/v1/completions",
        json={**LONG, "n": 4, "stream": True},
        timeout=limit(5),
    ) as s:
        next(s.iter_lines())
    gave_back(server, before)


def test_leaving_before_the_answer_frees_its_pages(server: Server) -> None:
    """F45, F46: four run, the others wait; none goes on after its client left."""
    server.rests()
    before = server.ends()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json={**LONG, "n": 8}, timeout=LEAVES)
    gave_back(server, before)


def test_too_many_get_429_with_retry_after_and_readiness_stays(server: Server) -> None:
    """And 429s alone count as load that was rejected, never a client's mistakes."""
    server.rests()
    before = server.probe("/load")[1]["refusedLast60s"]
    for _ in range(3):
        refused(post(server, {**LONG, "n": 0}), 400, "n")
    body = {**LONG, "prompt": ["x"] * 100}
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=limit(5)
    ) as s:
        lines = s.iter_lines()  # held: the response closes with it
        next(lines)
        answer = post(server, body)
    refused(answer, 429, "try again")
    assert answer.headers["retry-after"] == "1"
    assert server.probe("/readyz")[0] == 200
    wait_for(lambda: server.probe("/load")[1]["refusedLast60s"] != before)
    load = server.probe("/load")[1]
    assert load["refusedLast60s"] == before + 100  # sequences
    assert 0 < load["retrying"] <= 100


def test_every_request_is_counted_once(server: Server) -> None:
    """Invariant 3, over everything that this module has asked."""
    server.rests()
    # Each HTTP process reports its ends with its next heartbeat.
    server.ended(lambda ends: ends["finished"] > 10 and ends["aborted"] >= 2)
    ends = server.ends()
    assert ends["failed"] == 0 and ends["refused"] > 60
