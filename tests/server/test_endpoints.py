"""The routes beside those that generate: the model's card, its tokenizer, probes of other tools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import CONTEXT, VOCABULARY, Scripted
from waiting import answer_of, limit

from kvline_server.http.tokens import Tokens
from kvline_server.ipc.totals import SCORE_BYTES

Post = Callable[[str, dict[str, Any]], httpx.Response]
MESSAGES = [{"role": "user", "content": "<|start|>hé"}]


@pytest.fixture(scope="module")
def post(tiny_model: Path) -> Post:
    """One request to a server of its own event loop; nothing of it is held afterwards."""
    scripted = Scripted(tiny_model, root="org/name")

    def ask(path: str, body: dict[str, Any]) -> httpx.Response:
        async def play() -> httpx.Response:
            transport = httpx.ASGITransport(scripted.app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://tiny", timeout=limit(60)
            ) as http:
                method = "GET" if body == {"method": "GET"} else "POST"
                return await http.request(method, path, json=None if method == "GET" else body)

        answer = asyncio.run(play())
        assert scripted.admission.totals[SCORE_BYTES] == scripted.admission.active == 0
        return answer

    return ask


GET = {"method": "GET"}


def test_a_text_is_tokenised_as_a_prompt_is(post: Post, tiny_model: Path) -> None:
    body = {"model": "tiny", "prompt": "hé<|end|>", "return_token_strs": True}
    made = post("/tokenize", body).json()
    assert made["tokens"] == Tokens(tiny_model).encode("hé<|end|>")
    assert made["count"] == 4 and made["max_model_len"] == CONTEXT
    assert len(made["token_strs"]) == 4 and made["token_strs"][3] == "<|end|>"
    plain = post("/tokenize", {"prompt": "hé<|end|>", "add_special_tokens": False}).json()
    assert plain["tokens"] == made["tokens"] and plain["token_strs"] is None
    assert post("/detokenize", {"tokens": made["tokens"]}).json() == {"prompt": "hé<|end|>"}


def test_a_chat_is_tokenised_as_its_prompt_is(post: Post) -> None:
    body = {"model": "tiny", "messages": MESSAGES, "add_special_tokens": False}
    made = post("/tokenize", body).json()
    text = post("/detokenize", {"tokens": made["tokens"]}).json()["prompt"]
    assert text == "<|start|>user\n<|start|>hé<|end|>\n<|start|>assistant\n"
    assert made["tokens"].count(256) == 2, "what the client wrote is no control token"
    bare = post("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}).json()
    assert text.startswith(post("/detokenize", {"tokens": bare["tokens"]}).json()["prompt"])
    assert bare["count"] < made["count"]


@settings(deadline=None, max_examples=20)
@given(st.text(max_size=50))
def test_a_text_comes_back(post: Post, text: str) -> None:
    tokens = post("/tokenize", {"prompt": text}).json()["tokens"]
    assert post("/detokenize", {"tokens": tokens}).json() == {"prompt": text}


def test_a_long_text_is_tokenised_beyond_the_context(post: Post) -> None:
    """Clients cut by it what is too long; a text too long to tokenise has the code they know."""
    made = post("/tokenize", {"prompt": "ab" * CONTEXT, "return_token_strs": True}).json()
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"]) == 2 * CONTEXT
    assert made["tokens"][:2] * CONTEXT == made["tokens"]


def test_a_text_is_made_in_room_that_was_taken_before(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many at once would be in memory before the first is refused. A byte may take six in JSON."""
    made = Scripted(tiny_model, max_held=2048)
    held, decode, zero = [], made.tokens.decode, made.tokens.encode("\0")

    def seen(ids: list[int]) -> str:
        held.append(made.admission.totals[SCORE_BYTES])
        return decode(ids)

    monkeypatch.setattr(made.tokens, "decode", seen)

    async def play() -> None:
        async with made.http:
            answer = await made.http.post("/detokenize", json={"tokens": zero * 100})
            assert answer.status_code == 200 and held[0] >= len(answer.content)
            assert made.admission.totals[SCORE_BYTES] == 0
            beyond = await made.http.post("/detokenize", json={"tokens": zero * 1000})
            error = beyond.json()["error"]
            assert (beyond.status_code, error["param"]) == (400, "tokens") and len(held) == 1

    asyncio.run(play())


def test_a_text_needs_no_renderer(tiny_model: Path) -> None:
    """Chats that take long to render keep all of them busy."""
    made = Scripted(tiny_model)

    async def play() -> None:
        async with made.http, made.service.rendering:
            answer = await answer_of(made.http.post("/tokenize", json={"prompt": "hé"}), 30)
            assert answer.json()["count"] == 3
            chat = asyncio.ensure_future(made.http.post("/tokenize", json={"messages": MESSAGES}))
            await made.http.post("/tokenize", json={"prompt": "hé"})
            assert not chat.done()
            made.service.rendering.release()
            assert (await answer_of(chat, 30)).status_code == 200
            await made.service.rendering.acquire()

    asyncio.run(play())


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        ("/tokenize", {}, 400, "prompt", "missing_required_parameter"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt", "invalid_type"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model", "model_not_found"),
        ("/tokenize", {"prompt": "a", "max_tokens": 1}, 400, "max_tokens", "unknown_parameter"),
        ("/tokenize", {"messages": []}, 400, "messages", "empty_array"),
        ("/tokenize", {"messages": MESSAGES, "prompt": "a"}, 400, "prompt", "unknown_parameter"),
        (
            "/tokenize",
            {"messages": MESSAGES, "add_special_tokens": True},
            400,
            "add_special_tokens",
            "unsupported_value",
        ),
        (
            "/tokenize",
            {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f"}}]},
            400,
            "tools",
            "unsupported_value",
        ),
        ("/detokenize", {}, 400, "tokens", "missing_required_parameter"),
        ("/detokenize", {"tokens": [1.5]}, 400, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [VOCABULARY]}, 400, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [5] * (CONTEXT + 1)}, 400, "tokens", "invalid_value"),
        # The Agents SDK sends what OpenAI's newest model alone takes where it is given no model.
        (
            "/v1/responses",
            {"input": "a", "model": "other", "text": {"verbosity": "low"}},
            404,
            "model",
            "model_not_found",
        ),
        ("/v1/chat/completions", {"model": "other"}, 404, "model", "model_not_found"),
        ("/v1/chat/completions", {"model": 7}, 400, "model", "invalid_type"),
        ("/v1/embeddings", {"input": "a"}, 404, None, "unknown_url"),
        ("/v1/rerank", {"query": "a"}, 404, None, "unknown_url"),
        ("/version", {}, 405, None, "method_not_supported"),
    ],
)
def test_what_is_wrong_is_named(
    post: Post, path: str, body: dict[str, Any], status: int, param: str | None, code: str
) -> None:
    answer = post(path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (status, param, code)


def test_nothing_is_as_short_as_it_can_be(post: Post) -> None:
    assert post("/detokenize", {"tokens": []}).json() == {"prompt": ""}
    assert post("/tokenize", {"prompt": ""}).json()["tokens"] == []


def test_the_model_s_card_has_what_clients_of_vllm_read(post: Post) -> None:
    [card] = post("/v1/models", GET).json()["data"]
    assert (card["id"], card["root"], card["parent"]) == ("tiny", "org/name", None)
    assert card["max_model_len"] == CONTEXT
    [permission] = card["permission"]
    assert permission["object"] == "model_permission" and permission["allow_sampling"] is True
    assert post("/v1/models/tiny", GET).json() == card


def test_the_server_s_version_and_health_are_where_other_tools_ask(post: Post) -> None:
    assert post("/version", GET).json()["version"].startswith("0.")
    for asked in (GET, {}):
        answer = post("/ping", asked)
        assert (answer.status_code, answer.json()) == (200, {})
