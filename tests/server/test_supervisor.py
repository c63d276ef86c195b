"""A server's life and ends: every death has a meaning, and none is a healthy-looking corpse."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256

import httpx
import pytest
from crowded import crowded_out
from servers import SEARCHED, STRESS, Server, wait_for
from waiting import answered, limit, within

from kvline_contract.launch import GateFile
from kvline_server.memory.pages import PAGE_SIZE
from kvline_server.options.timeouts import Timeouts

pytestmark = pytest.mark.process

HALF = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: 9999\r\n\r\n{"
)
# The operator's, of which the gate file has the digest.
NOTICE = {"Authorization": "Bearer a-token"}
DIGEST = sha256(b"a-token").hexdigest()
LEAVES = 0.2  # seconds after which a client has left
LONG = {"model": "tiny", "prompt": "hello", "max_tokens": 240, "ignore_eos": True}


def test_it_answers_probes_before_it_is_validated_and_sizes_itself(
    start: Callable[..., Server],
) -> None:
    server = start(**SEARCHED)
    server.wait("/livez", 200, 5)
    assert server.probe("/startupz")[0] == 503
    assert server.probe("/load")[0] == 503
    for path in ("/v1/models", "/v1/models/tiny"):
        early = httpx.get(f"{server.url}{path}", timeout=limit(30))
        assert early.status_code == 503 and "not ready yet" in early.json()["error"]["message"]
    server.wait("/readyz")
    assert (
        httpx.get(f"{server.url}/v1/models", timeout=limit(5)).json()["data"][0]["max_model_len"]
        == 256
    )
    report = server.sizing()
    assert report["state"] == "Validated"
    names = [s["name"] for s in report["stages"]]
    assert names[:3] == ["load", "row counts", "probe"]  # there is nothing to tune
    assert names[-4:] == ["stress", "measure", "map", "validate"]
    result = report["result"]
    assert result["kvTokens"] % PAGE_SIZE == 0
    memory = result["memory"]
    figures = sum(v for k, v in memory.items() if k not in ("totalMiB", "parts"))
    assert figures == memory["totalMiB"] == 900 and "runtime" in str(memory["parts"])
    (rank,) = server.probe("/sizing?version=2")[1]["result"]["ranks"]
    assert sum(part["mib"] for part in rank["parts"]) == rank["totalMiB"] == 900
    assert (server.probe("/sizing?version=2")[1]["result"]["cacheDtype"]) == "float32"
    versions = {v: server.probe(f"/sizing?version={v}")[1]["version"] for v in (1, 2, 3, 9)}
    assert versions == {1: 1, 2: 2, 3: 3, 9: 3} and report["version"] == 1
    status, body = server.probe("/sizing?version=two")
    assert status == 400 and "'two'" in body["reason"]
    assert not (server.scratch / "state" / "attempts.json").exists()
    assert server.probe("/metrics")[1].count("kvline_kv_budget_tokens") == 3


def test_a_pin_skips_the_search_but_not_the_validation_and_sigterm_ends_it_at_once(
    start: Callable[..., Server],
) -> None:
    """F48: an idle server ends within 10 s of SIGTERM, with 0."""
    server = start()
    server.wait()
    report = server.sizing()
    assert report["result"]["kvTokens"] == 2048
    assert report["result"]["source"] == "Pinned"
    names = [s["name"] for s in report["stages"]]
    assert "stress" not in names
    assert names[-1] == "validate"
    server.process.send_signal(signal.SIGTERM)
    assert server.end(10) == 0  # where the drain would be two minutes


def test_sigterm_lets_streams_finish_and_takes_what_comes_on_open_connections(
    start: Callable[..., Server],
) -> None:
    """F49: for 4 s (not 5) a client with a connection pool may send what it likes, and is answered
    with `Connection: close`. Then the port closes, and requests under way go on."""
    server = start(clients={"late": 4.0})
    server.wait()
    with (
        httpx.Client(base_url=server.url, timeout=limit(30)) as pool,
        httpx.stream(
            "POST", f"{server.url}/v1/completions", json={**LONG, "stream": True}, timeout=limit(30)
        ) as stream,
    ):
        assert pool.get("/v1/models").headers.get("connection") != "close"
        lines = stream.iter_lines()
        next(lines)
        engine = server.children()["engine"]
        os.kill(engine, signal.SIGSTOP)  # so that the stream is still open below
        server.process.send_signal(signal.SIGTERM)
        server.wait("/readyz", 503)
        while (late := pool.get("/v1/models")).headers.get("connection") != "close":
            assert late.status_code == 200  # the HTTP process hears of it a moment later
        assert late.status_code == 200
        wrong = pool.post("/v1/completions", json={**LONG, "max_tokens": -1})
        assert wrong.status_code == 400 and wrong.headers["connection"] == "close"
        server.waits_until_closed()  # while the stream goes on
        os.kill(engine, signal.SIGCONT)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert server.end() == 0
    assert "drained in" in server.output()
    assert "1 requests finished, 0 cut off" in server.output()


def test_a_connection_whose_stream_began_before_the_drain_takes_one_more_request(
    start: Callable[..., Server],
) -> None:
    """F49: a client with a pool sends one more request after a stream that began before the drain,
    and is answered with `Connection: close`. The stream's head could not say so."""
    server = start(clients={"late": 5.0})
    server.wait()
    with httpx.Client(base_url=server.url, timeout=limit(30)) as pool:
        body = {**LONG, "stream": True}
        with pool.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            assert stream.headers.get("connection") != "close"
            engine = server.children()["engine"]
            os.kill(engine, signal.SIGSTOP)  # so that the port closes before the stream ends
            server.process.send_signal(signal.SIGTERM)
            server.waits_until_closed()
            os.kill(engine, signal.SIGCONT)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        time.sleep(limit(0.5))  # a close would have come
        late = pool.post("/v1/completions", json={**LONG, "max_tokens": 2})
        assert late.status_code == 200 and late.headers["connection"] == "close"
    assert server.end() == 0
    assert "2 requests finished, 0 cut off" in server.output()


def test_a_second_sigterm_ends_at_once(start: Callable[..., Server]) -> None:
    """F48: a second SIGTERM ends a server with a stream within 10 s, with 0."""
    server = start()
    server.wait()
    with httpx.stream(
        "POST",
        f"{server.url}/v1/completions",
        json={**LONG, "n": 4, "stream": True},
        timeout=limit(30),
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        os.kill(server.children()["engine"], signal.SIGSTOP)  # the stream will not end by itself
        server.process.send_signal(signal.SIGTERM)
        server.wait("/readyz", 503)  # a second signal before it would be the same one
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        assert server.end(10) == 0
        assert "shut down" in [line for line in lines if line][-1], "its client has an error"
    assert re.search(
        r"ended after \d+\.\d s, at once by a second signal: 0 .* 1 cut off", server.output()
    )


def test_a_drain_is_as_long_as_its_launch_says(start: Callable[..., Server]) -> None:
    """A stream that outlives the drain ends with an error event in OpenAI's form, another request
    with a status. An incomplete body does not delay the drain. The default is two minutes."""
    assert Timeouts().drain == 120
    server = start(drain_seconds=2, limits={"drain": 0.1})
    server.wait()
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={**LONG, "stream": True}, timeout=limit(30)
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        os.kill(server.children()["engine"], signal.SIGSTOP)
        before = server.sockets()
        with (
            ThreadPoolExecutor(1) as pool,
            socket.create_connection(("127.0.0.1", server.port)) as half,
        ):
            half.sendall(HALF)
            whole = pool.submit(
                httpx.post, f"{server.url}/v1/completions", json=LONG, timeout=limit(30)
            )
            wait_for(lambda: server.sockets() >= before + 2)  # both are connected
            began = time.monotonic()
            with within(30):
                server.process.send_signal(signal.SIGTERM)
                last = [line for line in lines if line][-1]
            assert time.monotonic() - began > 1.5
            assert whole.result().status_code == 503
            assert whole.result().json()["error"]["type"] == "server_error"
    error = json.loads(last.removeprefix("data: "))["error"]
    assert error["type"] == "server_error"
    assert "shut down" in error["message"]
    assert server.end() == 0
    assert "drain of 2 s was over: 0 requests finished, 2 cut off" in server.output()
    took = re.search(r"ended after (\d+\.\d) s, as its drain", server.output())
    assert took is not None and 2 <= float(took[1]) <= limit(10)
    assert "Traceback" not in server.output()


def test_an_engine_exception_answers_everybody_and_ends_the_pod(
    start: Callable[..., Server],
) -> None:
    """F51: the client is answered within 10 s (not 2 s, as builds run beside these tests)."""
    server = start(faults={"KVLINE_FAULT_STEP": f"{STRESS + 1}:raise"})
    server.wait()
    with within(10):
        answer = httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=limit(30))
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert server.end(30) == 50  # where a drain would be two minutes
    assert server.termination()["name"] == "EngineDied"


def test_a_device_failure_while_serving_holds_and_shows_the_device_error(
    start: Callable[..., Server],
) -> None:
    server = start(faults={"KVLINE_FAULT_STEP": f"{STRESS + 1}:device"})
    server.wait()
    assert (
        httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=limit(30)).status_code == 500
    )
    assert server.end(30) == 43
    ended = server.termination()
    assert ended["name"] == "DeviceFailure"
    assert "launch: CUDA error: an illegal memory access" in ended["message"]


def test_an_engine_that_cannot_be_understood_answers_everybody_and_ends_the_pod(
    start: Callable[..., Server],
) -> None:
    """F51: both processes live, and what passes between them cannot be read."""
    server = start(faults={"KVLINE_FAULT_FRAMES": "engine"})
    server.wait()
    answer = httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=limit(30))
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    server.wait("/readyz", 503)
    assert server.end(30) == 50
    assert "invalid message" in server.termination()["message"]


@pytest.mark.parametrize(
    ("sender", "named"), [("parent", "the parent sent"), ("http", "an HTTP process sent")]
)
def test_a_process_that_cannot_be_understood_ends_the_pod_with_that_reason(
    start: Callable[..., Server], sender: str, named: str
) -> None:
    """What was sent ended the reader's thread alone, and the start hung until its limit."""
    server = start(faults={"KVLINE_FAULT_FRAMES": sender})
    assert server.end(60) == 50
    assert server.termination()["message"].startswith(f"{named} a frame of 3 bytes is no message")


@pytest.mark.parametrize("fault", ["oom", "kill"])
@pytest.mark.fault(
    "F50",
    shows="an out-of-memory error raised in a request's step, and a kill there: the client gets "
    "500, exit code 51; on the CPU",
)
def test_death_for_memory_while_serving_has_its_own_code(
    start: Callable[..., Server], fault: str
) -> None:
    server = start(faults={"KVLINE_FAULT_STEP": f"{STRESS + 1}:{fault}"})
    server.wait()
    answer = httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=limit(30))
    assert answer.status_code == 500
    assert server.end() == 51
    assert server.termination()["name"] == "OutOfMemoryServing"


@pytest.mark.parametrize("step", [1, STRESS + 1])  # while it is sized, and while it serves
def test_a_kill_that_was_not_for_memory_is_not_called_so(
    start: Callable[..., Server], step: int
) -> None:
    """Any SIGKILL counted as out of memory, and shrank the size that was tried."""
    server = start(faults={"KVLINE_FAULT_STEP": f"{step}:signal"})
    if step > 1:
        server.wait()
        assert (
            httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=limit(30)).status_code
            == 500
        )
    assert server.end(60) == 50
    assert "signal 9, which the kernel did not send for memory" in server.termination()["message"]


@pytest.mark.fault(
    "F52",
    "L15",
    shows="with the limit of 60 s set to 4 s: an engine, or an HTTP process, stopped by a signal "
    "fails readiness, then the pod ends with code 45; one that idles for 5 s does neither",
)
@pytest.mark.parametrize(("name", "reason"), [("engine", "EngineStalled"), ("http", "HttpStalled")])
def test_a_process_that_hangs_ends_the_pod_and_an_idle_one_does_not(
    start: Callable[..., Server], name: str, reason: str
) -> None:
    """F52, with the minute shortened to four seconds. The kubelet ended the pod before, with exit
    code 0 and without a word."""
    server = start(limits={"liveness": 4.0})
    server.wait()
    if name == "engine":  # neither did anything then
        time.sleep(limit(5))  # longer than it may be hung, which grows likewise
    assert server.probe("/readyz")[0] == server.probe("/livez")[0] == 200
    os.kill(server.children()[name], signal.SIGSTOP)
    server.wait("/readyz", 503)
    assert server.probe("/readyz")[1]["reason"] == reason
    assert server.probe("/livez")[0] == 200, "the parent says itself why it ends"
    assert server.end(20) == 45
    ended = server.termination()
    what = "the engine ran no step" if name == "engine" else "an HTTP process answered nothing"
    assert ended["name"] == "NoProgress" and ended["message"].startswith(what)


def test_an_engine_that_its_node_gives_no_cpu_is_not_ended(start: Callable[..., Server]) -> None:
    """Others have most of its CPU, so that a step of a second takes longer than the limit by
    the clock. The request is answered; liveness ended the pod before."""
    spin = {"KVLINE_FAULT_STEP": f"{STRESS + 1}:spin", "KVLINE_FAULT_SPIN": str(limit(1.0))}
    server = start(limits={"liveness": 4.0}, faults=spin)
    server.wait()
    began = time.monotonic()
    with crowded_out(server.children()["engine"]):
        body = {**LONG, "max_tokens": 1}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=limit(100))
    assert answer.status_code == 200 and server.process.poll() is None
    assert time.monotonic() - began > limit(4.5)


@pytest.mark.fault(
    "F53",
    shows="a C call holds the interpreter lock of the HTTP process for 20 s: each of five probe "
    "paths answers while it does",
)
def test_a_blocked_event_loop_fails_no_probe(start: Callable[..., Server]) -> None:
    """F53: a C call that holds the interpreter lock of the HTTP process for 20 seconds."""
    server = start(faults={"KVLINE_FAULT_HTTP_BLOCK": "20"})
    server.wait()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=LEAVES)

    def blocked() -> bool:
        try:
            httpx.get(f"{server.url}/v1/models", timeout=limit(1))
        except httpx.ReadTimeout:
            return True
        return False

    wait_for(blocked)
    for path in ("/livez", "/readyz", "/startupz", "/metrics", "/sizing"):
        assert server.probe(path)[0] == 200
    assert blocked()


def test_a_wait_for_clients_ends_when_another_pod_needs_the_gpu(
    start: Callable[..., Server],
) -> None:
    server = start(gate=GateFile(1, True, token_sha256=DIGEST), limits={"leave": 60.0})
    server.wait("/readyz")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.probe, "/prestop", limit(30))
        time.sleep(limit(0.5))
        url = f"http://127.0.0.1:{server.internal_port}"
        for headers in ({}, {"Authorization": "Bearer another"}):
            refused = httpx.post(f"{url}/prestop/end", headers=headers, timeout=limit(5))
            assert (refused.status_code, refused.json()) == (503, {"reason": "UnknownToken"})
        assert not waiting.done()
        ended = httpx.post(f"{url}/prestop/end", headers=NOTICE, timeout=limit(5))
        assert ended.status_code == 200
        with answered():
            assert waiting.result(timeout=limit(5))[0] == 200
    assert httpx.post(f"{url}/readyz", timeout=limit(5)).status_code == 404


def test_the_gate_keeps_a_validated_pod_out_until_it_opens(start: Callable[..., Server]) -> None:
    """A pod that was never ready waits for no clients as it ends: a rejected candidate kept its
    GPU for 15 s more while nothing served."""
    server = start(gate=GateFile(1, False), limits={"gate": 0.1, "leave": limit(3)})
    server.wait("/startupz")
    assert server.probe("/prestop", timeout=limit(2))[0] == 200
    assert server.probe("/readyz") == (503, {"reason": "GateClosed"})
    server.write_gate(GateFile(1, True, min_kv_tokens=4096))
    wait_for(lambda: server.probe("/readyz") == (503, {"reason": "BelowMinimum"}))
    device = server.sizing()["provenance"]["gpu"]
    server.write_gate(GateFile(1, True, 0, 1, {device: 4096, "NVIDIA H200": 1}))
    time.sleep(limit(0.5))
    assert server.probe("/readyz") == (503, {"reason": "BelowMinimum"}), "its own entry counts"
    server.write_gate(GateFile(1, True, 2048, 4096, {device: 2048, "NVIDIA H200": 4096}))
    server.wait("/readyz", 200)
    server.write_gate(GateFile(1, True, min_kv_tokens=4096))
    time.sleep(limit(0.5))
    assert server.probe("/readyz")[0] == 200  # it serves already
    (server.scratch / "gate.json").write_text("not json")
    time.sleep(limit(0.5))
    assert server.probe("/readyz")[0] == 200  # the last good one holds
    server.write_gate(GateFile(1, False))
    server.wait("/readyz", 503)
    with pytest.raises(httpx.ReadTimeout):  # it had clients, and they may not know yet
        server.probe("/prestop", timeout=limit(2))
    assert server.probe("/prestop", timeout=limit(10))[0] == 200


def test_the_operator_s_notice_opens_the_gate_until_the_file_says_so(
    start: Callable[..., Server],
) -> None:
    """The kubelet may take a minute to bring the file; the notice lets no one pass who lacks KV
    tokens. The pod's UID, which the same port prints, is not enough."""
    closed = GateFile(1, False, token_sha256=DIGEST)
    server = start(gate=replace(closed, min_kv_tokens=4096), limits={"gate": 0.1})
    server.wait("/startupz")
    assert server.probe("/readyz") == (503, {"reason": "GateClosed"})
    url = f"http://127.0.0.1:{server.internal_port}/gate/open?uid="
    other = httpx.post(f"{url}another-pod-s", headers=NOTICE, timeout=limit(5))
    assert other.json() == {"reason": "OtherPod"}
    own = f"{url}{server.sizing()['podUID']}"
    assert httpx.post(own, timeout=limit(5)).json() == {"reason": "UnknownToken"}
    assert server.probe("/readyz") == (503, {"reason": "GateClosed"})
    assert httpx.post(own, headers=NOTICE, timeout=limit(5)).status_code == 200
    assert server.probe("/readyz") == (503, {"reason": "BelowMinimum"})
    server.write_gate(replace(closed, min_kv_tokens=2048))
    server.wait("/readyz")
    server.write_gate(GateFile(1, True))
    time.sleep(limit(0.5))
    assert server.probe("/readyz")[0] == 200
    server.write_gate(GateFile(1, False))
    server.wait("/readyz", 503)
