"""The usual clients' plain features against SmolLM2, which writes what it likes: clients accept its
answers, usage adds up, and what a grammar guarantees is valid. `make clients`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import model
import pytest
from driven import Driven, all_driven
from features import CITIES
from forced_server import KEY
from servers import Server
from tested_clients import Client

from kvline_contract.launch import CapacityOptions, EngineOptions

pytestmark = pytest.mark.clients
SECONDS = 180.0  # of a start: the model is loaded and validated
MOST = 40  # tokens that a case asks for
CASES = {
    "plain_openai.py": "chat stream tools tools_stream strict_tools required required_stream "
    "parallel history structured json_object responses responses_stream responses_tools "
    "responses_required responses_structured",
    "plain_anthropic.py": "messages messages_stream messages_tools messages_tools_stream "
    "messages_required messages_required_stream messages_history count_tokens",
}
ENDS = {"stop", "length", "tool_calls", "completed", "incomplete"}
ENDS |= {"end_turn", "max_tokens", "tool_use"}


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Driven]]:
    """Clients of a server with SmolLM2, by their scripts."""
    folder = tmp_path_factory.mktemp("plain")
    key = folder / "key"
    key.write_text(KEY)
    server = Server(
        model.ensure(print),
        folder / "server",
        EngineOptions(max_model_len=512, max_prefill_tokens=256, max_running_requests=2),
        CapacityOptions(kv_tokens=1024, headroom_mib=8),
        key=key,
        http_processes=1,
    ).start()
    try:
        server.wait(seconds=SECONDS)
        with all_driven(server.url) as started:
            for script in CASES:
                started[script] = Driven(Client(script, "", script, "clients", ()), server.url)
            yield started
    finally:
        server.stop()


def a_city(arguments: str) -> None:
    value = json.loads(arguments)
    assert list(value) == ["city"] and value["city"] in CITIES, value


def called(value: dict[str, Any]) -> None:
    """Calls by a grammar, and no text; the last one may be cut where the tokens end."""
    cut = value["finish"] in ("length", "max_tokens", "incomplete")
    assert not value["text"], value
    for at, (name, arguments) in enumerate(value["calls"]):
        assert name in ("get_weather", "get_time"), value
        if not cut or at + 1 < len(value["calls"]):
            a_city(arguments)


def check(case: str, value: dict[str, Any]) -> None:
    prompt, written, total = value["usage"]
    assert prompt > 0 and 0 < written <= MOST and prompt + written == total, value
    assert value["finish"] in ENDS, value
    assert value["text"] or value["calls"], value
    assert len(set(value["ids"])) == len(value["calls"]), value
    if "required" in case or case == "parallel":
        called(value)
    if case == "strict_tools":
        for _, arguments in value["calls"]:
            a_city(arguments)
    if "structured" in case:
        a_city(value["text"])
        a_city(json.dumps(value["parsed"]))
    if case in ("chat", "stream", "responses", "responses_stream", "messages", "messages_stream"):
        assert "Paris" in value["text"] and not value["calls"], value
    if case.endswith("stream") and value["text"]:
        assert value["parts"] > 1, value
    if case.endswith("history"):
        assert value["text"] and not value["calls"], value
    if case == "count_tokens":
        assert value["counted"] == prompt, value
    if case == "json_object":
        assert value["starts"] == "{" and value["is_whole"], value


@pytest.mark.parametrize(
    ("script", "case"),
    [
        pytest.param(script, case, id=f"{script.removesuffix('.py')}-{case}")
        for script, cases in CASES.items()
        for case in cases.split()
    ],
)
def test_a_plain_model_s_answer_is_accepted(
    asked: dict[str, Driven], script: str, case: str
) -> None:
    check(case, asked[script].ask(case))
