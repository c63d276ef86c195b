"""What clients may make the HTTP process hold is reserved beside the KV cache."""

from __future__ import annotations

import json
import re
import select
import socket
from contextlib import ExitStack
from pathlib import Path

import client_load
import httpx
import pytest
from servers import Server, wait_for
from waiting import answered, limit

from kvline_contract.launch import Device
from kvline_server.http.admission import Admission
from kvline_server.http.body import MAX_VALUES, parse_object
from kvline_server.http.completions import Completion
from kvline_server.http.engine_client import EngineClient
from kvline_server.http.errors import BadRequest, TooMany
from kvline_server.http.generate import Generator, RequestLimits
from kvline_server.http.protocol.completions import CompletionRequest
from kvline_server.http.protocol.strict import parse
from kvline_server.http.tokens import Tokens
from kvline_server.http.trace import Traces
from kvline_server.options.clients import ClientLimits

MIB = 1 << 20
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n"
)


def memory(pid: int) -> dict[str, int]:
    """Bytes."""
    text = Path(f"/proc/{pid}/status").read_text()
    return {k: int(v) << 10 for k, v in re.findall(r"(VmHWM|RssAnon|RssFile):\s+(\d+)", text)}


def peak(pid: int) -> int:
    """Anonymous memory at its most since the mark was cleared; file pages may be dropped."""
    found = memory(pid)
    return found["VmHWM"] - found["RssFile"]


@pytest.mark.process
def test_all_that_clients_may_do_at_once_fits_what_is_reserved_for_them(tiny_model: Path) -> None:
    """Unread streams with logprobs in all places, scored prompts, half bodies on all other
    connections, large bodies of token ids, and texts."""
    growth, _ = client_load.played("all of them", tiny_model)
    assert client_load.reserved() // 2 < growth <= client_load.reserved()
    assert ClientLimits().on(Device.CPU).memory(8192, 16) <= 86 * MIB


@pytest.mark.process
def test_costly_bodies_at_once_take_no_more_than_is_reserved(server: Server) -> None:
    """Ten bodies of 400,000 token ids, 30 MiB each when parsed: three are held, within 6 MiB, and
    one is parsed at a time."""
    pid = server.children()["http"]
    ids = b'{"prompt": [' + b",".join([b"999"] * 400_000) + b"]}"
    rest = memory(pid)["RssAnon"]
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    with ExitStack() as stack:
        clients = []
        for _ in range(10):
            client = socket.create_connection(("127.0.0.1", server.port), limit(30))
            clients.append(stack.enter_context(client))
            client.sendall(HEAD % len(ids) + ids[:-1])
        wait_for(lambda: len(select.select(clients, [], [], 0)[0]) == 7)
        refused = select.select(clients, [], [], 0)[0]
        for client in set(clients) - set(refused):
            client.sendall(ids[-1:])
        with answered():
            answers = [client.recv(1 << 16).split(b" ", 2)[1] for client in clients]
    assert sorted(answers) == [b"400"] * 3 + [b"429"] * 7
    assert 8 * MIB < peak(pid) - rest < 64 * MIB
    wait_for(lambda: httpx.get(f"{server.url}/health", timeout=limit(5)).status_code == 200)


@pytest.mark.parametrize("item", [b"[]", b"{}", b'""', b'"\\""'])
def test_a_body_of_countless_small_values_is_refused_before_it_is_parsed(item: bytes) -> None:
    many = b'{"prompt": [' + b",".join([item] * MAX_VALUES) + b"]}"
    with pytest.raises(BadRequest, match="texts, lists and objects"):
        parse_object(many)
    text = json.dumps({"prompt": '[{"' * MAX_VALUES}).encode()
    assert len(parse_object(text)["prompt"]) == 3 * MAX_VALUES, "what stands in a text is no value"


def test_a_request_counts_until_it_notices_that_its_client_has_left() -> None:
    admission = Admission(max_requests=1)
    admission.open(16, 17_408)
    with (
        admission.request(),
        pytest.raises(TooMany, match="too many requests"),
        admission.request(),
    ):
        pass
    assert (admission.received, admission.refused, admission.rejected) == (2, 1, 1)
    with admission.request():
        assert admission.active == 1


def test_prompts_of_one_request_are_bounded_together_before_all_are_tokenised(
    tiny_model: Path,
) -> None:
    limits = RequestLimits("tiny", 307, 512, 20, max_prompt_tokens=1000)
    generator = Generator(EngineClient(9), Tokens(tiny_model, max_text=1000), Traces(None))
    body = {"model": "tiny", "prompt": ["x" * 400] * 3}
    with pytest.raises(BadRequest, match="takes 1000 KV tokens in a request"):
        Completion("id", parse(CompletionRequest, body), generator, limits, 0.0).plan()
    body["prompt"] = ["x" * 400] * 2
    assert len(Completion("id", parse(CompletionRequest, body), generator, limits, 0.0).plan()) == 2


def test_a_text_that_takes_too_much_to_tokenise_is_refused_by_its_size(tiny_model: Path) -> None:
    tokens = Tokens(tiny_model, max_text=1000)
    assert len(tokens.encode("x" * 1000)) == 1000
    for context in (400, 20):
        with pytest.raises(BadRequest, match="1002 bytes; this server tokenises 1000") as refused:
            tokens.encode("\u00e9" * 501, context)
        assert refused.value.code == "context_length_exceeded"  # clients then send a shorter one
