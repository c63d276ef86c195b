"""A pod that ends for its engine's sake ends after its clients have their errors, however slow the
HTTP process is; a client that takes none does not hold it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from crowded import crowded_out
from servers import STRESS, Server, launch_config, wait_for
from waiting import limit

from kvline_contract.launch import CapacityOptions, EngineOptions
from kvline_server.options.options import Options
from kvline_server.parent.children import Child
from kvline_server.parent.drain import END_SECONDS
from kvline_server.parent.supervisor import Supervisor

pytestmark = pytest.mark.process

# So long that an engine is killed in the middle of it, however late the test is.
ENGINE = EngineOptions(max_model_len=512, max_running_requests=4)
CAPACITY = CapacityOptions(kv_tokens=8192, headroom_mib=8)
LONG: dict[str, Any] = {
    "model": "tiny",
    "prompt": "hello",
    "max_tokens": 500,
    "ignore_eos": True,
    "n": 8,
}
HALF = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: 9999\r\n\r\n{"
)
POST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n"
)
MANY = 500
ENGINE_DIED = 50


def sequences(server: Server) -> int:
    load = server.probe("/load")[1]
    return int(load["running"] + load["waiting"])


def last_event(server: Server) -> str:
    body = {**LONG, "stream": True}
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=body, timeout=limit(30)
    ) as answer:
        return [line for line in answer.iter_lines() if line][-1]


def test_clients_of_a_slow_http_process_have_their_errors_before_the_pod_ends(
    start: Callable[..., Server],
) -> None:
    """The parent gave it 0.2 s by the clock, and clients found their connection closed."""
    server = start(engine=ENGINE, capacity=CAPACITY)
    server.wait()
    children = server.children()
    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(
            httpx.post, f"{server.url}/v1/completions", json=LONG, timeout=limit(30)
        )
        stream = pool.submit(last_event, server)
        wait_for(lambda: sequences(server) > LONG["n"])  # both have come
        os.kill(children["http"], signal.SIGSTOP)
        os.kill(children["engine"], signal.SIGKILL)
        time.sleep(0.7)  # the 0.2 s have passed, and most of the 3 s have not
        assert server.process.poll() is None
        os.kill(children["http"], signal.SIGCONT)
        assert whole.result().status_code == 500
        error = json.loads(stream.result().removeprefix("data: "))["error"]
        assert error["type"] == "server_error"
    assert server.end() == ENGINE_DIED


def test_clients_of_an_engine_that_the_parent_cannot_understand_have_their_errors(
    start: Callable[..., Server],
) -> None:
    """The parent ended the HTTP process with it."""
    garbles = {"KVLINE_FAULT_STEP": f"{STRESS + 2}:garble"}
    server = start(engine=ENGINE, capacity=CAPACITY, faults=garbles)
    server.wait()
    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(
            httpx.post, f"{server.url}/v1/completions", json=LONG, timeout=limit(30)
        )
        stream = pool.submit(last_event, server)
        assert whole.result().status_code == 500
        error = json.loads(stream.result().removeprefix("data: "))["error"]
        assert error["type"] == "server_error"
    assert server.end() == ENGINE_DIED
    assert server.termination()["message"].startswith("rank 0 sent a frame of 3 bytes")


def test_a_size_whose_engine_the_parent_cannot_understand_is_no_failed_attempt(
    start: Callable[..., Server],
) -> None:
    server = start(faults={"KVLINE_FAULT_STEP": "3:garble"})
    assert server.end(60) == ENGINE_DIED
    attempts = server.scratch / "state" / "attempts.json"
    assert "Running" not in attempts.read_text()


def test_each_of_five_hundred_open_requests_has_its_error_on_a_crowded_core(
    start: Callable[..., Server],
) -> None:
    """The parent ended the HTTP process 0.2 s after the engine, then 3 s by the clock, and most
    clients found a closed connection."""
    server = start(
        engine=EngineOptions(max_model_len=512, max_running_requests=100),
        capacity=CAPACITY,
        clients={"connections": MANY + 100},
    )
    server.wait()
    children = server.children()
    body = json.dumps({**LONG, "n": 1}).encode()
    request = POST % len(body) + body
    with ExitStack() as stack:
        waiting = [
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port), limit(60)))
            for _ in range(MANY)
        ]
        for client in waiting:
            client.sendall(request)
        wait_for(lambda: sequences(server) >= MANY, 60)
        with crowded_out(children["http"]):
            os.kill(children["engine"], signal.SIGKILL)
            answers = [everything(client) for client in waiting]
    assert Counter(answer[:13] for answer in answers) == {b"HTTP/1.1 500 ": MANY}
    assert server.end() == ENGINE_DIED


def test_what_a_busy_node_keeps_from_http_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients had 3 s by the clock to get their errors."""
    parent = Supervisor(Options(config=tmp_path, state_dir=tmp_path), launch_config(tmp_path))
    with subprocess.Popen(["sh", "-c", "while :; do :; done"]) as process:
        parent.http = [Child(process, None, [])]  # type: ignore[arg-type] # sends nothing
        with crowded_out(process.pid):
            owed = time.monotonic() + END_SECONDS + 2
            monkeypatch.setattr(
                parent.health, "owes_answers", lambda ended: time.monotonic() < owed
            )
            parent._wait_for_answers()
            took = time.monotonic()
        process.kill()
    assert took >= owed


def everything(client: socket.socket) -> bytes:
    """Until the server closes; a reset is an end as well."""
    got = b""
    with suppress(ConnectionError):
        while part := client.recv(1 << 16):
            got += part
    return got


def test_a_client_that_never_sends_its_whole_request_does_not_hold_the_end(
    start: Callable[..., Server],
) -> None:
    server = start()
    server.wait()
    with socket.create_connection(("127.0.0.1", server.port)) as half:
        half.sendall(HALF)
        os.kill(server.children()["engine"], signal.SIGKILL)
        assert server.end(END_SECONDS + 5) == ENGINE_DIED
