"""A server's life and ends: every death has a meaning, and none is a healthy-looking corpse."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import Server

from kvline_contract.launch import CapacityOptions, EngineOptions, GateFile
from kvline_server.memory.pages import PAGE_SIZE

pytestmark = pytest.mark.process

LONG = {"model": "tiny", "prompt": "hello", "max_tokens": 240, "ignore_eos": True}


@pytest.fixture
def start(tiny_model: Path, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    made: list[Server] = []

    def begin(**options: Any) -> Server:
        made.append(Server(tiny_model, tmp_path, **options).start())
        return made[-1]

    yield begin
    for server in made:
        server.stop()


def test_it_answers_probes_before_it_is_validated_and_sizes_itself(
    start: Callable[..., Server],
) -> None:
    server = start(capacity=CapacityOptions(headroom_mib=8), memory=900 << 20)
    server.wait("/livez", 200, 5)
    assert server.probe("/startupz")[0] == 503
    assert server.probe("/load")[0] == 503
    server.wait("/readyz")
    report = server.sizing()
    assert report["state"] == "Validated"
    names = [s["name"] for s in report["stages"]]
    assert names[:3] == ["load", "autotune", "probe"]
    assert "validate output-logprobs" in names
    autotune = report["stages"][1]
    assert autotune["ms"] <= 1
    assert "nothing is tunable" in autotune["detail"]
    result = report["result"]
    assert result["kvTokens"] % PAGE_SIZE == 0
    memory = result["memory"]
    assert sum(v for k, v in memory.items() if k != "totalMiB") == memory["totalMiB"] == 900
    assert not (server.scratch / "state" / "attempts.json").exists()
    assert server.probe("/metrics")[1].count("kvline_kv_budget_tokens") == 3


def test_a_pin_skips_the_search_but_not_the_validation(start: Callable[..., Server]) -> None:
    server = start()
    server.wait()
    report = server.sizing()
    assert report["result"]["kvTokens"] == 2048
    assert report["result"]["source"] == "Pinned"
    names = [s["name"] for s in report["stages"]]
    assert not [n for n in names if n.startswith("stress ")]
    assert "validate decode" in names


def test_sigterm_while_idle_ends_at_once_with_zero(start: Callable[..., Server]) -> None:
    """F48."""
    server = start()
    server.wait()
    started = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.end(5) == 0
    assert time.monotonic() - started < 2


def test_sigterm_lets_streams_finish_and_refuses_new_ones(start: Callable[..., Server]) -> None:
    """F49."""
    server = start()
    server.wait()
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={**LONG, "stream": True}, timeout=30
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        engine = server.children()["engine"]
        os.kill(engine, signal.SIGSTOP)  # so that the stream is still there when we look
        server.process.send_signal(signal.SIGTERM)
        server.wait("/readyz", 503, 3)
        time.sleep(0.5)  # the HTTP process hears of it a moment later
        late = httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=5)
        assert late.status_code == 503
        assert late.headers["connection"] == "close"
        os.kill(engine, signal.SIGCONT)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert server.end(5) == 0


def test_a_second_sigterm_ends_at_once(start: Callable[..., Server]) -> None:
    """F48."""
    server = start()
    server.wait()
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={**LONG, "n": 4, "stream": True}, timeout=30
    ) as stream:
        next(stream.iter_lines())
        os.kill(server.children()["engine"], signal.SIGSTOP)  # the stream will not end by itself
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        assert server.end(2) == 0


def test_streams_that_outlive_the_drain_are_cut(start: Callable[..., Server]) -> None:
    server = start(limits={"drain": 0.5})
    server.wait()
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={**LONG, "stream": True}, timeout=30
    ) as stream:
        next(stream.iter_lines())
        os.kill(server.children()["engine"], signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        assert server.end(5) == 0


def test_an_engine_exception_answers_everybody_and_ends_the_pod(
    start: Callable[..., Server],
) -> None:
    """F51: the pinned start runs six batches; the seventh is a request's."""
    server = start(faults={"KVLINE_FAULT_STEP": "7:raise"})
    server.wait()
    started = time.monotonic()
    answer = httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=30)
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert server.end(30) == 50
    assert time.monotonic() - started < 40  # at once, where a drain would wait 45 s
    assert server.termination()["name"] == "EngineDied"


@pytest.mark.parametrize("fault", ["7:oom", "7:kill"])
def test_death_for_memory_while_serving_has_its_own_code(
    start: Callable[..., Server], fault: str
) -> None:
    server = start(faults={"KVLINE_FAULT_STEP": fault})
    server.wait()
    answer = httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=10)
    assert answer.status_code == 500
    assert server.end(5) == 51
    assert server.termination()["name"] == "OutOfMemoryServing"


def test_a_hung_engine_fails_liveness_and_an_idle_one_does_not(
    start: Callable[..., Server],
) -> None:
    """F52, with the minute shortened to two seconds."""
    server = start(limits={"liveness": 2.0})
    server.wait()
    time.sleep(3)
    assert server.probe("/livez")[0] == 200
    os.kill(server.children()["engine"], signal.SIGSTOP)
    server.wait("/livez", 503, 5)
    assert server.probe("/livez")[1]["reason"] == "EngineStalled"
    assert server.probe("/readyz")[0] == 200


def test_a_blocked_event_loop_fails_no_probe(start: Callable[..., Server]) -> None:
    """F53: a C call that holds the interpreter lock of the HTTP process for three seconds."""
    server = start(faults={"KVLINE_FAULT_HTTP_BLOCK": "3"})
    server.wait()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=LONG, timeout=0.2)
    for path in ("/livez", "/readyz", "/startupz", "/metrics", "/sizing"):
        started = time.monotonic()
        assert server.probe(path)[0] == 200
        assert time.monotonic() - started < 1


def test_an_engine_killed_while_validating_goes_on_with_the_next_attempt(
    start: Callable[..., Server],
) -> None:
    """cgroup v1: only the engine dies. The probe runs six batches; the eighth is a validation's."""
    server = start(
        capacity=CapacityOptions(headroom_mib=8),
        memory=900 << 20,
        faults={"KVLINE_FAULT_STEP": "8:kill"},
    )
    server.wait()
    report = server.sizing()
    first, second = [a for a in report["attempts"] if a["number"]]
    assert first["outcome"] == "Killed"
    assert second["outcome"] == "Survived"
    assert second["targetTokens"] == first["targetTokens"] * 95 // 100 // 16 * 16
    assert report["result"]["kvTokens"] == second["targetTokens"]
    assert report["warnings"]


def test_a_container_killed_whole_goes_on_with_the_next_attempt(
    start: Callable[..., Server],
) -> None:
    """cgroup v2: every process dies at once; only the file on the emptyDir tells."""
    options = {"capacity": CapacityOptions(headroom_mib=8), "memory": 900 << 20}
    server = start(**options)
    while not [a for a in server_attempts(server) if a["number"] == 1]:
        time.sleep(0.01)
    target = server_attempts(server)[-1]["targetTokens"]
    children = server.children()
    for pid in (server.process.pid, *children.values()):
        os.kill(pid, signal.SIGKILL)
    server.process.wait()
    again = start(**options)
    again.wait()
    report = again.sizing()
    assert [(a["number"], a["outcome"]) for a in report["attempts"]] == [
        (1, "Killed"),
        (2, "Survived"),
    ]
    assert report["result"]["kvTokens"] == target * 95 // 100 // 16 * 16
    assert not [s for s in report["stages"] if s["name"].startswith("stress ")]


def server_attempts(server: Server) -> list[dict[str, Any]]:
    try:
        return list(server.sizing()["attempts"])
    except httpx.HTTPError:
        return []


def test_four_killed_attempts_are_a_diagnosed_failure_not_a_crash_loop(
    start: Callable[..., Server],
) -> None:
    server = start(
        capacity=CapacityOptions(headroom_mib=8),
        memory=900 << 20,
        faults={"KVLINE_FAULT_STEP": "1:kill", "KVLINE_FAULT_ALWAYS": "1"},
    )
    assert server.end(60) == 40
    ended = server.termination()
    assert ended["name"] == "OutOfMemory"
    assert ended["knobs"]
    assert "probing" in ended["message"]


def test_memory_refused_by_the_device_shrinks_in_the_same_process(
    start: Callable[..., Server],
) -> None:
    server = start(
        capacity=CapacityOptions(headroom_mib=8),
        memory=900 << 20,
        faults={"KVLINE_FAULT_STEP": "7:oom"},
    )
    server.wait()
    outcomes = [(a["number"], a["outcome"]) for a in server.sizing()["attempts"]]
    assert outcomes == [(0, "Survived"), (1, "OutOfMemory"), (2, "Survived")]
    assert server.probe("/metrics")[1].count("kvline_engine_starts_total 1.0") == 1


def test_a_pin_that_does_not_survive_fails_and_is_never_changed(
    start: Callable[..., Server],
) -> None:
    server = start(faults={"KVLINE_FAULT_STEP": "1:oom"})
    assert server.end(60) == 40
    ended = server.termination()
    assert "kvTokens pins 2048 tokens" in ended["message"]
    assert [a["targetTokens"] for a in ended["attempts"]] == [2048]
    assert ended["knobs"][0] == {"field": "spec.capacity.kvTokens", "direction": "lower"}


def test_a_context_that_does_not_fit_names_the_largest_that_does(
    start: Callable[..., Server],
) -> None:
    server = start(
        engine=EngineOptions(max_model_len=256, max_running_requests=4),
        capacity=CapacityOptions(kv_tokens=128, headroom_mib=8),
    )
    assert server.end(60) == 41
    ended = server.termination()
    assert ended["largestMaxModelLen"] == 128
    assert ended["binding"] == "Context"
    assert "maxModelLen is 256, the budget holds 128 tokens" in ended["message"]


def test_weights_that_do_not_fit_are_diagnosed_before_the_kernel_kills(
    start: Callable[..., Server],
) -> None:
    server = start(capacity=CapacityOptions(headroom_mib=8), memory=64 << 20)
    assert server.end(60) == 40
    ended = server.termination()
    assert "spec.resources.memory" in ended["message"]
    memory = ended["memory"]
    assert sum(v for k, v in memory.items() if k != "totalMiB") == memory["totalMiB"] == 64


def test_settings_the_model_cannot_have_end_with_the_field(start: Callable[..., Server]) -> None:
    """C14: both figures."""
    server = start(engine=EngineOptions(max_model_len=513))
    assert server.end(60) == 20
    assert "maxModelLen is 513, the model's own limit is 512" in server.termination()["message"]


def test_a_model_that_cannot_run_ends_within_ten_seconds(
    start: Callable[..., Server], tiny_model: Path, tmp_path: Path
) -> None:
    """F56, as a pod sees it."""
    broken = tmp_path / "broken"
    broken.mkdir()
    text = (tiny_model / "config.json").read_text()
    (broken / "config.json").write_text(
        text.replace('"architectures"', '"auto_map": {}, "architectures"')
    )
    server = Server(broken, tmp_path / "scratch").start()
    try:
        assert server.end(10) == 32
        assert "auto_map" in server.termination()["message"]
    finally:
        server.stop()


@pytest.mark.parametrize("which", ["port", "internal_port"])
def test_a_taken_port_is_named(start: Callable[..., Server], which: str) -> None:
    """F61."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start(**{which: port})
        assert server.end(10) == 21
        assert str(port) in server.termination()["message"]


def test_the_gate_keeps_a_validated_pod_out_until_it_opens(start: Callable[..., Server]) -> None:
    server = start(gate=GateFile(1, False), limits={"gate": 0.1})
    server.wait("/startupz")
    assert server.probe("/readyz") == (503, {"reason": "GateClosed"})
    server.write_gate(GateFile(1, True, min_kv_tokens=4096))
    time.sleep(0.5)
    assert server.probe("/readyz") == (503, {"reason": "BelowMinimum"})
    server.write_gate(GateFile(1, True, min_kv_tokens=2048))
    server.wait("/readyz", 200, 3)
    server.write_gate(GateFile(1, True, min_kv_tokens=4096))
    time.sleep(0.5)
    assert server.probe("/readyz")[0] == 200  # it serves already
    (server.scratch / "gate.json").write_text("not json")
    time.sleep(0.5)
    assert server.probe("/readyz")[0] == 200  # the last good one holds
    server.write_gate(GateFile(1, False))
    server.wait("/readyz", 503, 3)
