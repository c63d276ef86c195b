"""The API key: who is let in, who is not, and what follows when it changes or is missing."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from servers import Server, serving
from waiting import answered, limit

from kvline_server.errors import SecretMissing
from kvline_server.http.access import Key

KEY = "s3cret-" + "k" * 40
BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 2}


def headers(*values: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), *((b"authorization", value) for value in values)]


@pytest.mark.parametrize(
    ("given", "good"),
    [
        (headers(f"Bearer {KEY}".encode()), True),
        (headers(f"bearer  {KEY} ".encode()), True),
        (headers(), False),
        (headers(b""), False),
        (headers(b"Bearer"), False),
        (headers(b"Bearer "), False),
        (headers(KEY.encode()), False),
        (headers(f"Basic {KEY}".encode()), False),
        (headers(f"Bearer {KEY[:-1]}".encode()), False),
        (headers(f"Bearer {KEY}x".encode()), False),
        (headers(f"Bearer {KEY}".upper().encode()), False),
        (headers(b"Bearer " + b"k" * (1 << 20)), False),
        (headers("Bearer schl\u00fcssel".encode()), False),
        (headers(b"Bearer \xff\xfe"), False),
        (headers(f"Bearer {KEY}".encode(), b"Bearer other"), False),
        (headers(f"Bearer {KEY}".encode(), f"Bearer {KEY}".encode()), False),
        ([(b"x-api-key", KEY.encode())], True),
        ([*headers(f"Bearer {KEY}".encode()), (b"X-Api-Key", KEY.encode())], True),
        ([*headers(f"Bearer {KEY}".encode()), (b"x-api-key", b"other")], False),
        ([*headers(b"Bearer other"), (b"x-api-key", KEY.encode())], False),
        ([*headers(b""), (b"x-api-key", KEY.encode())], False),
        ([(b"x-api-key", b"")], False),
        ([(b"x-api-key", KEY.encode()), (b"x-api-key", KEY.encode())], False),
    ],
)
def test_one_header_with_the_whole_key(
    tmp_path: Path, given: list[tuple[bytes, bytes]], good: bool
) -> None:
    """H41."""
    file = tmp_path / "key"
    file.write_text(KEY + "\n")
    assert Key(file).matches(given) is good


def test_a_changed_key_counts_and_a_vanished_one_stays(tmp_path: Path) -> None:
    file, now = tmp_path / "key", [0.0]
    file.write_text("old")
    key = Key(file, lambda: now[0])
    file.write_text("new")
    assert key.matches(headers(b"Bearer old")) and not key.matches(headers(b"Bearer new"))
    now[0] = 1.0
    assert key.matches(headers(b"Bearer new")) and not key.matches(headers(b"Bearer old"))
    file.unlink()
    now[0] = 2.0
    assert key.matches(headers(b"Bearer new"))


@pytest.mark.parametrize("content", [None, b"", b" \n", b"k" * 4097])
def test_no_key_is_no_start(tmp_path: Path, content: bytes | None) -> None:
    """C12: absent, empty, a newline, too long."""
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SecretMissing, match=r"spec\.access\.apiKeySecretRef"):
        Key(file)


@pytest.fixture
def guarded(tiny_model: Path, tmp_path: Path) -> Iterator[Server]:
    file = tmp_path / "key"
    file.write_text(KEY)
    with serving(Server(tiny_model, tmp_path / "run", key=file)) as made:
        yield made


@pytest.mark.process
def test_a_server_with_a_key_serves_who_knows_it(guarded: Server) -> None:
    """H41: on every route of the public port but /health and /ping, before a body is read."""
    good = {"Authorization": f"Bearer {KEY}"}
    for method, path in (("GET", "/v1/models"), ("POST", "/tokenize"), ("GET", "/else")):
        refused = httpx.request(method, guarded.url + path, timeout=limit(5))
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert refused.headers["WWW-Authenticate"] == "Bearer"
        assert KEY not in refused.text
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        refused = httpx.post(guarded.url + path, json={}, timeout=limit(5))
        assert refused.status_code == 401
        assert refused.json()["error"]["type"] == "authentication_error"
        known = httpx.post(
            guarded.url + path, json={}, headers={"x-api-key": KEY}, timeout=limit(5)
        )
        assert known.status_code == 400 and known.json()["type"] == "error"
    assert httpx.get(f"{guarded.url}/v1/models", headers=good, timeout=limit(5)).status_code == 200
    answer = httpx.post(f"{guarded.url}/v1/completions", json=BODY, headers=good, timeout=limit(30))
    assert answer.json()["usage"]["completion_tokens"] == 2
    with socket.create_connection(("127.0.0.1", guarded.port), limit(5)) as raw:
        # A body that is announced and never comes holds nothing up.
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 999999\r\n\r\n")
        with answered():
            head = raw.recv(64)
        assert head.startswith(b"HTTP/1.1 401")
    assert guarded.probe("/readyz")[0] == 200
    for path in ("/health", "/ping"):
        assert httpx.get(f"{guarded.url}{path}", timeout=limit(5)).status_code == 200
    assert KEY not in guarded.output()


@pytest.mark.process
def test_a_missing_key_ends_the_start_with_its_own_code(
    start: Callable[..., Server], tmp_path: Path
) -> None:
    server = start(key=tmp_path / "nothing")
    assert server.end(30) == 22
    assert server.termination()["name"] == "SecretMissing"
    assert "spec.access.apiKeySecretRef" in server.termination()["message"]
