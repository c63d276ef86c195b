"""Prompt logprobs as arrays: the numbers of the JSON form in a fraction of the bytes."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import numpy as np
import pytest
from servers import Server
from waiting import limit

pytestmark = pytest.mark.process

KINDS = {
    "tokens": "<i4",
    "logprobs": "<f4",
    "ranks": "<i4",
    "top_ids": "<i4",
    "top_logprobs": "<f4",
}
PROMPT = [7, 99, 12, 200, 41, 3, 3, 250]
COMPLETION = {"model": "tiny", "prompt": PROMPT, "max_tokens": 2, "temperature": 0.0}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi there"}], "max_tokens": 2}


def ask(server: Server, body: dict[str, Any], path: str = "/v1/completions") -> Any:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=limit(30))
    return answer.status_code, answer.json()


def arrays(packed: dict[str, Any]) -> dict[str, np.ndarray]:
    read = {k: np.frombuffer(base64.b64decode(packed[k]), kind) for k, kind in KINDS.items()}
    shape = (packed["count"], packed["top"])
    return read | {k: read[k].reshape(shape) for k in ("top_ids", "top_logprobs")}


@pytest.mark.parametrize("top", [0, 3])
def test_arrays_hold_the_numbers_of_the_json_form(server: Server, top: int) -> None:
    body = {**COMPLETION, "prompt_logprobs": top}
    _, plain = ask(server, body)
    _, made = ask(server, {**body, "prompt_logprobs_format": "base64"})
    read = arrays(made["choices"][0]["prompt_logprobs"])
    assert read["tokens"].tolist() == PROMPT[1:]
    assert read["top_ids"].shape == (len(PROMPT) - 1, top)
    for row, entry in enumerate(plain["choices"][0]["prompt_logprobs"][1:]):
        chosen = entry[str(PROMPT[row + 1])]
        assert chosen["logprob"] == pytest.approx(float(read["logprobs"][row]), abs=1e-6)
        assert chosen["rank"] == read["ranks"][row]
        for id, value in zip(read["top_ids"][row], read["top_logprobs"][row], strict=True):
            assert entry[str(id)]["logprob"] == pytest.approx(float(value), abs=1e-6)


def test_echo_s_own_logprobs_do_not_widen_the_arrays(server: Server) -> None:
    body = {**COMPLETION, "prompt_logprobs": 1, "echo": True, "logprobs": 4}
    _, made = ask(server, {**body, "prompt_logprobs_format": "base64"})
    choice = made["choices"][0]
    assert arrays(choice["prompt_logprobs"])["top_ids"].shape == (len(PROMPT) - 1, 1)
    assert len(choice["logprobs"]["token_logprobs"]) == len(PROMPT) + 2


def test_chat_gives_arrays_too_and_a_lone_token_has_none(server: Server) -> None:
    body = {**CHAT, "prompt_logprobs": 2, "prompt_logprobs_format": "base64"}
    _, made = ask(server, body, "/v1/chat/completions")
    assert arrays(made["prompt_logprobs"])["ranks"].min() >= 1
    alone = {**COMPLETION, "prompt": [5], "prompt_logprobs": 2, "prompt_logprobs_format": "base64"}
    assert arrays(ask(server, alone)[1]["choices"][0]["prompt_logprobs"])["tokens"].size == 0


@pytest.mark.parametrize("format", ["numpy", "", 1])
def test_another_format_is_refused_by_name(server: Server, format: Any) -> None:
    body = {**COMPLETION, "prompt_logprobs": 1, "prompt_logprobs_format": format}
    status, answer = ask(server, body)
    assert status == 400 and answer["error"]["param"] == "prompt_logprobs_format"


def test_a_format_of_nothing_is_refused(server: Server) -> None:
    status, answer = ask(server, {**COMPLETION, "prompt_logprobs_format": "base64"})
    assert status == 400 and "prompt_logprobs_format" in answer["error"]["message"]
