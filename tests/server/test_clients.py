"""Compatibility with other programs: lm-eval, OpenAI's client, benchmark tools.

The rules of those programs stand here as they are written there, so that a change of ours that
breaks one of them fails here first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from drawn import firm
from servers import Server
from waiting import limit

from kvline_server.ipc.sampling_params import SamplingParams

pytestmark = pytest.mark.process

END = 257  # the tiny model's end token
ENDS_AT_ONCE = {"temperature": 0, "logit_bias": {str(END): 100}}


def ask(server: Server, body: dict[str, Any], path: str = "/v1/completions") -> dict[str, Any]:
    answer = httpx.post(f"{server.url}{path}", json={"model": "tiny", **body}, timeout=limit(60))
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def stream(
    server: Server, body: dict[str, Any], path: str = "/v1/completions"
) -> list[dict[str, Any]]:
    """The events of a stream up to [DONE], which must be its last."""
    with httpx.stream(
        "POST",
        f"{server.url}{path}",
        json={"model": "tiny", "stream": True, **body},
        timeout=limit(60),
    ) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


# lm-eval's local-completions ------------------------------------------------------------------


def parse_logprobs(answer: dict[str, Any], contexts: list[int]) -> list[tuple[float, bool]]:
    """lm-eval's LocalCompletionsAPI.parse_logprobs, rule for rule: all but the context's tokens and
    the last entry, which it takes for the one generated token."""
    out = []
    choices = sorted(answer["choices"], key=lambda c: int(c["index"]))
    for choice, context in zip(choices, contexts, strict=True):
        tokens = choice["logprobs"]["token_logprobs"][context:-1]
        tops = choice["logprobs"]["top_logprobs"][context:-1]
        greedy = all(t == max(top.values()) for t, top in zip(tokens, tops, strict=True))
        out.append((sum(tokens), greedy))
    return out


@pytest.mark.parametrize("extra", [{}, ENDS_AT_ONCE], ids=["goes-on", "ends-at-once"])
def test_lm_eval_sums_the_whole_continuation(server: Server, extra: dict[str, Any]) -> None:
    """A model that ends at once once had no entry for its end token: lm-eval then took the prompt's
    last token for it and left that out of the sum."""
    prompts = [[7, 99, 12, 200, 41], [3, 3, 250, 17]]
    contexts = [2, 3]
    asked = {"prompt": prompts, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    answer = ask(server, {"temperature": 0, **asked, **extra})
    read = parse_logprobs(answer, contexts)
    scored = ask(server, {"prompt": prompts, "max_tokens": 0, "prompt_logprobs": 1})
    for (total, _), choice, ids, context in zip(
        read, scored["choices"], prompts, contexts, strict=True
    ):
        entries = choice["prompt_logprobs"]
        expected = sum(entries[i][str(ids[i])]["logprob"] for i in range(context, len(ids)))
        assert total == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("max_tokens", [1, 8])
@pytest.mark.parametrize("n", [1, 3])
def test_every_counted_token_has_its_entry(server: Server, max_tokens: int, n: int) -> None:
    """The end token too: it is counted, so it is scored."""
    asked = {"max_tokens": max_tokens, "n": n, **ENDS_AT_ONCE}
    answer = ask(server, {"prompt": "hello", "logprobs": 1, **asked})
    assert [c["finish_reason"] for c in answer["choices"]] == ["stop"] * n
    entries = [c["logprobs"]["token_logprobs"] for c in answer["choices"]]
    assert [len(e) for e in entries] == [1] * n
    assert answer["usage"]["completion_tokens"] == n
    assert answer["choices"][0]["text"] == ""
    messages = [{"role": "user", "content": "hi"}]
    chat = ask(server, {"messages": messages, "logprobs": True, **asked}, "/v1/chat/completions")
    contents = [c["logprobs"]["content"] for c in chat["choices"]]
    assert [[e["token"] for e in content] for content in contents] == [["<|end|>"]] * n
    assert chat["usage"]["completion_tokens"] == n


# OpenAI's client ------------------------------------------------------------------------------

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
SHARED = "n stop seed user logprobs temperature top_p frequency_penalty presence_penalty logit_bias"
OF_CHAT = (
    "tools tool_choice functions function_call response_format audio modalities prediction store "
    "reasoning_effort metadata top_logprobs max_tokens service_tier web_search_options verbosity"
)


def nulls(names: str) -> Any:
    return dict.fromkeys(names.split())


def test_an_explicit_null_is_a_field_left_out(client: openai.OpenAI) -> None:
    none = nulls(f"{SHARED} max_tokens stream stream_options best_of echo suffix")
    text = client.completions.create(model="tiny", prompt="hello", extra_body=none)
    assert text.usage is not None and 1 <= text.usage.completion_tokens <= 16
    none = nulls(f"{SHARED} stream stream_options {OF_CHAT}")
    chat = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_completion_tokens=2,
        extra_body=none | {"ignore_eos": True},
    )
    assert chat.choices[0].finish_reason == "length"


def test_neutral_values_of_unsupported_fields_are_accepted(client: openai.OpenAI) -> None:
    """Client libraries send such fields at their defaults."""
    chat = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=2,
        max_completion_tokens=2,
        response_format={"type": "text"},
        service_tier="auto",
        parallel_tool_calls=True,
        tools=[],
        tool_choice="none",
        modalities=["text"],
        store=False,
        metadata={"team": "x"},
        user="someone",
        safety_identifier="someone",
        prompt_cache_key="key",
        top_logprobs=0,
        verbosity="medium",
        extra_body={"ignore_eos": True},  # the random model may sample its end
    )
    assert chat.choices[0].finish_reason == "length"
    text = client.completions.create(
        model="tiny",
        prompt="hello",
        max_tokens=2,
        best_of=1,
        suffix="",
        stop=[],
        logit_bias={},
        extra_body={"ignore_eos": True},
    )
    assert text.choices[0].finish_reason == "length"


def test_a_history_of_dumped_messages_is_taken_back(client: openai.OpenAI) -> None:
    """As programs keep it: message.model_dump(), with nulls for all that the answer lacked."""
    messages = list(MESSAGES)
    for _ in range(2):
        answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=3)
        messages += [answer.choices[0].message.model_dump(), {"role": "user", "content": "go on"}]
    messages[1]["provider_specific_fields"] = {"refusal": None}  # LiteLLM's message.model_dump()
    silent: Any = {"role": "assistant", "content": None, "annotations": [], "tool_calls": []}
    client.chat.completions.create(model="tiny", messages=[*messages, silent], max_tokens=1)


def test_null_content_is_empty_text_to_the_template(server: Server) -> None:
    def prompt_tokens(message: dict[str, Any]) -> int:
        body = {"messages": [message, *MESSAGES], "max_tokens": 1}
        return int(ask(server, body, "/v1/chat/completions")["usage"]["prompt_tokens"])

    empty = prompt_tokens({"role": "assistant", "content": ""})
    assert prompt_tokens({"role": "assistant", "content": None}) == empty
    assert prompt_tokens({"role": "assistant"}) == empty


def test_one_model_is_found_by_its_name(client: openai.OpenAI) -> None:
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("tiny/other")
    assert missing.value.code == "model_not_found"


@pytest.mark.parametrize("blank", [" ", "\n", "   \t"])
def test_blanks_are_a_prompt(server: Server, blank: str) -> None:
    answer = ask(server, {"prompt": blank, "max_tokens": 1, "echo": True})
    assert answer["usage"]["prompt_tokens"] == len(blank)
    assert answer["choices"][0]["text"].startswith(blank)


def test_as_many_prompts_as_promised_are_answered(server: Server) -> None:
    """On a server that runs four at a time and queues sixteen."""
    answer = ask(server, {"prompt": ["x"] * 128, "max_tokens": 1})
    assert len(answer["choices"]) == 128


def test_cached_tokens_are_part_of_the_prompt_s(server: Server) -> None:
    body = {"prompt": "shared by many" * 6, "max_tokens": 1, "n": 4}
    first, second = (ask(server, body)["usage"] for _ in range(2))
    assert first["prompt_tokens"] == 84
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == 80


@pytest.mark.parametrize("n", [1, 2])
def test_chat_logprobs_of_every_choice(client: openai.OpenAI, n: int) -> None:
    asked: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4, "n": n, "seed": 5}
    asked |= {"logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**asked)
    got: dict[int, list[Any]] = {i: [] for i in range(n)}
    for part in client.chat.completions.create(**asked, stream=True):
        for choice in part.choices:
            if choice.logprobs is not None:
                got[choice.index] += choice.logprobs.content or []
    assert whole.usage is not None
    for choice in whole.choices:
        assert choice.logprobs is not None
        entries = choice.logprobs.content or []
        assert [len(e.top_logprobs) for e in entries] == [3] * len(entries)
        assert [e.token for e in got[choice.index]] == [e.token for e in entries]
    assert sum(len(e) for e in got.values()) == whole.usage.completion_tokens


# Where a token stands in the text -----------------------------------------------------------------

WIDE = "a😀é\nß"  # characters of one, four and two bytes; the tiny model has a token a byte


def test_offsets_count_characters_not_tokens(server: Server) -> None:
    """A token that begins inside a character has that character's place."""
    choice = ask(
        server, {"prompt": WIDE, "max_tokens": 3, "logprobs": 1, "echo": True, "temperature": 0}
    )["choices"][0]
    offsets = choice["logprobs"]["text_offset"]
    assert offsets[:10] == [0, 1, 1, 1, 1, 2, 2, 3, 4, 4]
    assert offsets[10] == len(WIDE)
    assert all(a <= b for a, b in pairwise(offsets))


def test_offsets_of_special_tokens_and_of_output(server: Server) -> None:
    ids = [256, 72, 73, 257]  # <|start|>, two letters, <|end|>
    choice = ask(
        server, {"prompt": ids, "max_tokens": 1, "logprobs": 0, "echo": True, **ENDS_AT_ONCE}
    )["choices"][0]
    start, end = len("<|start|>"), len("<|start|>") + 2
    assert choice["text"].endswith("<|end|>") and len(choice["text"]) == end + len("<|end|>")
    assert choice["logprobs"]["text_offset"] == [0, start, start + 1, end, len(choice["text"])]


# Streams ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [{}, {"logprobs": 2}, {"logprobs": 0, "max_tokens": 0}])
@pytest.mark.parametrize("n", [1, 2])
def test_a_streamed_echo_joins_to_the_whole_one(
    server: Server, tiny_model: Path, extra: dict[str, Any], n: int
) -> None:
    """Computed twice, in other batches: of prompts whose answers no rounding changes."""
    longer = (["grüße 😀 " * times for times in range(2, 9)], ["two", "three", "four", "five"])
    prompts = [next(firm(tiny_model, some, SamplingParams(4, temperature=0.0))) for some in longer]
    body = {"prompt": prompts, "max_tokens": 4, "n": n, "echo": True, "temperature": 0, **extra}
    whole = ask(server, body)["choices"]
    texts = [""] * len(whole)
    lists: list[dict[str, list[Any]]] = [{} for _ in whole]
    for part in stream(server, body):
        for choice in part["choices"]:
            texts[choice["index"]] += choice["text"]
            for name, values in (choice["logprobs"] or {}).items():
                lists[choice["index"]].setdefault(name, []).extend(values or [])
    assert texts == [c["text"] for c in whole]
    for got, choice in zip(lists, whole, strict=True):
        for name, values in (choice["logprobs"] or {}).items():
            assert got[name] == (values or []) or name in ("token_logprobs", "top_logprobs")
            assert len(got[name]) == len(values or [])


def test_no_text_breaks_a_line_of_a_stream(server: Server) -> None:
    """httpx, and with it guidellm, takes U+0085, U+2028 and U+2029 for ends of lines."""
    prompt = "one\x85two\u2028three\u2029\x0b\x1c\r\n"
    events = stream(server, {"prompt": prompt, "max_tokens": 0, "echo": True})
    assert "".join(c["text"] for e in events for c in e["choices"]) == prompt


def test_a_long_echo_comes_in_bounded_events(server: Server) -> None:
    prompt = "".join(chr(97 + i % 20) for i in range(250))
    events = stream(server, {"prompt": prompt, "max_tokens": 1, "echo": True, "logprobs": 1})
    choices = [c for e in events for c in e["choices"]]
    assert "".join(c["text"] for c in choices).startswith(prompt)
    sizes = [len(c["logprobs"]["tokens"]) for c in choices if c["logprobs"]]
    assert sum(sizes) == 251 and max(sizes) <= 64


CHAT_PATH = "/v1/chat/completions"


@pytest.mark.parametrize("path", ["/v1/completions", CHAT_PATH])
@pytest.mark.parametrize("n", [1, 2])
def test_usage_comes_once_and_is_null_before(server: Server, path: str, n: int) -> None:
    """stream_options.include_usage as OpenAI has it."""
    prompt = {"messages": MESSAGES} if path == CHAT_PATH else {"prompt": "hello"}
    body = {**prompt, "max_tokens": 3, "n": n, "ignore_eos": True}
    events = stream(server, {**body, "stream_options": {"include_usage": True}}, path)
    assert [e["usage"] for e in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 3 * n
    for options in (None, {}, {"include_usage": False}):
        asked = {**body, "stream_options": options}
        assert not any("usage" in e for e in stream(server, asked, path))


# Benchmark tools --------------------------------------------------------------------------------


def test_guidellm_s_requests_are_answered(server: Server) -> None:
    """It asks /health first, and counts tokens by the usage of every event."""
    assert httpx.get(f"{server.url}/health", timeout=limit(5)).status_code == 200
    options = {"include_usage": True, "continuous_usage_stats": True}
    shared = {"stream_options": options, "stop": None, "ignore_eos": True}
    for path, body in (
        ("/v1/completions", {"prompt": "hello", "max_tokens": 5}),
        (CHAT_PATH, {"messages": MESSAGES, "max_completion_tokens": 5}),
    ):
        used = [e["usage"] for e in stream(server, {**shared, **body}, path)]
        counts = [u["completion_tokens"] for u in used]
        assert counts == sorted(counts) and counts[-1] == 5
        assert len({u["prompt_tokens"] for u in used}) == 1
        assert all(u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"] for u in used)


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm-bench": (
        "/v1/completions",
        {
            "prompt": "hello",
            "temperature": 0.0,
            "repetition_penalty": 1.0,
            "max_tokens": 4,
            "logprobs": None,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        },
    ),
    "vllm-bench-old": (
        "/v1/completions",
        {"prompt": "hello", "temperature": 0.0, "best_of": 1, "use_beam_search": False}
        | {"max_tokens": 4, "stream": True, "top_p": 1.0, "top_k": -1, "length_penalty": 1.0},
    ),
    "vllm-bench-chat": (
        CHAT_PATH,
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
            "temperature": 0.0,
            "max_completion_tokens": 4,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    ),
    "genai-perf": (
        CHAT_PATH,
        {
            "messages": MESSAGES,
            "stream": True,
            "max_tokens": 4,
            "min_tokens": 4,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        },
    ),
    "langchain": (
        CHAT_PATH,
        {"messages": MESSAGES, "n": 1, "stream": False, "temperature": 0.7, "max_tokens": 4}
        | {"logprobs": False, "reasoning_effort": None, "service_tier": None},
    ),
    "langchain-text": (
        "/v1/completions",
        {"prompt": ["hello", "there"], "temperature": 0.7, "top_p": 1, "n": 1, "max_tokens": 4}
        | {"frequency_penalty": 0, "presence_penalty": 0, "logit_bias": None, "best_of": 1},
    ),
    "litellm": (
        CHAT_PATH,
        {"messages": [{"role": "user", "content": "hi", "name": "me"}], "max_tokens": 4}
        | {"stream": True, "stream_options": {"include_usage": True}, "parallel_tool_calls": False},
    ),
}


@pytest.mark.parametrize("tool", SHAPES)
def test_what_common_tools_send_is_answered(server: Server, tool: str) -> None:
    path, body = SHAPES[tool]
    if body.get("stream"):
        assert stream(server, body, path)
    else:
        assert ask(server, body, path)["usage"]["completion_tokens"] >= 1
