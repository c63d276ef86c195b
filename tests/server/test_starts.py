"""Failing starts: retried, shrunk, or ended with advice."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import SEARCHED, STRESS, Server, wait_for
from waiting import limit

from kvline_contract.launch import CapacityOptions, EngineOptions

pytestmark = pytest.mark.process


def test_an_engine_killed_while_validating_goes_on_with_the_next_attempt(
    start: Callable[..., Server],
) -> None:
    """cgroup v1: only the engine dies. The batch is one of the validation."""
    server = start(**SEARCHED, faults={"KVLINE_FAULT_STEP": f"{STRESS + 2}:kill"})
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
    server = start(**SEARCHED)
    wait_for(lambda: [a for a in server_attempts(server) if a["number"] == 1], every=0.01)
    target = server_attempts(server)[-1]["targetTokens"]
    children = server.children()
    for pid in (server.process.pid, *children.values()):
        os.kill(pid, signal.SIGKILL)
    server.process.wait()
    again = start(**SEARCHED)
    again.wait()
    report = again.sizing()
    assert [(a["number"], a["outcome"]) for a in report["attempts"]] == [
        (1, "Killed"),
        (2, "Survived"),
    ]
    assert report["result"]["kvTokens"] == target * 95 // 100 // 16 * 16
    assert not [s for s in report["stages"] if s["name"] == "stress"]


def server_attempts(server: Server) -> list[dict[str, Any]]:
    try:
        return list(server.sizing()["attempts"])
    except httpx.HTTPError:
        return []


def test_a_start_stopped_while_probing_is_no_failed_attempt(
    start: Callable[..., Server],
) -> None:
    """The next start on the same folder ended as killed for memory, for ever."""
    server = start(**SEARCHED)
    wait_for(lambda: server_attempts(server), every=0.005)
    assert not server.sizing()["result"]
    server.process.send_signal(signal.SIGTERM)
    assert server.end(60) == 0
    again = start(**SEARCHED)
    again.wait()
    assert [a["outcome"] for a in again.sizing()["attempts"]] == ["Survived"] * 2


def test_four_killed_attempts_are_a_diagnosed_failure_not_a_crash_loop(
    start: Callable[..., Server],
) -> None:
    server = start(**SEARCHED, faults={"KVLINE_FAULT_STEP": "1:kill", "KVLINE_FAULT_ALWAYS": "1"})
    assert server.end(60) == 40
    ended = server.termination()
    assert ended["name"] == "OutOfMemory"
    assert ended["knobs"]
    assert "probing" in ended["message"]


def test_memory_refused_by_the_device_shrinks_in_the_same_process(
    start: Callable[..., Server],
) -> None:
    server = start(**SEARCHED, faults={"KVLINE_FAULT_STEP": f"{STRESS + 1}:oom"})
    server.wait()
    report = server.sizing()
    probe, first, second = report["attempts"]
    outcomes = [(a["number"], a["outcome"]) for a in (probe, first, second)]
    assert outcomes == [(0, "Survived"), (1, "OutOfMemory"), (2, "Survived")]
    (why,) = [s["detail"] for s in report["stages"] if s["name"] == "shrink"]
    assert why.startswith(f"{first['targetTokens']} tokens did not fit: ")
    assert "out of memory" in why
    assert report["stages"][0]["name"] == "load"  # a report has the last MAX_STAGES
    assert server.probe("/metrics")[1].count("kvline_engine_starts_total 1.0") == 1


def test_a_pin_that_does_not_survive_fails_and_is_never_changed(
    start: Callable[..., Server],
) -> None:
    # Of a machine's free memory the advice would map and fill the half.
    memory = SEARCHED["memory"]
    server = start(memory=memory, faults={"KVLINE_FAULT_STEP": "1:oom"})
    assert server.end(60) == 40
    ended = server.termination()
    assert "kvTokens pins 2048 tokens" in ended["message"]
    assert [a["targetTokens"] for a in ended["attempts"]] == [2048]
    pin = ended["knobs"][0]
    assert (pin["field"], pin["direction"]) == ("spec.capacity.kvTokens", "lower")
    assert f"spec.capacity.kvTokens {pin['value']} would leave" in ended["message"]


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
    assert sum(part["mib"] for part in memory["parts"]) == memory["totalMiB"] == 64


def test_a_volume_that_hangs_is_stalled(start: Callable[..., Server]) -> None:
    server = start(faults={"KVLINE_FAULT_COPY": "60"}, limits={"stage": 4.0})
    assert server.end(40) == 52
    assert server.termination()["message"] == f"no progress in state Loading for {limit(4):.0f} s"


def test_settings_the_model_cannot_have_end_with_the_field(start: Callable[..., Server]) -> None:
    """C14: both figures."""
    server = start(engine=EngineOptions(max_model_len=513))
    assert server.end(60) == 20
    assert "maxModelLen is 513, the model's own limit is 512" in server.termination()["message"]


def test_a_model_that_cannot_run_ends_at_once(
    start: Callable[..., Server], tiny_model: Path, tmp_path: Path
) -> None:
    """F56: within 30 s (not 10), as a pod sees it."""
    broken = tmp_path / "broken"
    broken.mkdir()
    text = (tiny_model / "config.json").read_text()
    (broken / "config.json").write_text(
        text.replace('"architectures"', '"auto_map": {"AutoModel": "x.Y"}, "architectures"')
    )
    server = start(model=broken)
    assert server.end(30) == 32
    assert "auto_map" in server.termination()["message"]


@pytest.mark.parametrize("which", ["port", "internal_port"])
def test_a_taken_port_is_named(start: Callable[..., Server], which: str) -> None:
    """F61."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start(**{which: port})
        assert server.end(30) == 21
        assert str(port) in server.termination()["message"]
