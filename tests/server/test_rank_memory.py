"""Memory that torch refuses on one of several ranks: all shrink to one figure, or all end with one
diagnosis that names the rank. test_ranks.py and test_agreement.py have each call and stage of a
start; here are processes, where an error takes another way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import SEARCHED, STRESS, Server
from test_rank_processes import leftovers
from waiting import limit

pytestmark = pytest.mark.process

SECONDS = 60.0


def begin(
    start: Callable[..., Server],
    model: Path,
    rank: int,
    fault: str,
    kind: str = "MEMORY",
) -> Server:
    """With room for torch's own memory in each process."""
    faults = {f"KVLINE_FAULT_{kind}": fault, "KVLINE_FAULT_RANK": str(rank)}
    memory = 2 * int(SEARCHED["memory"])
    return start(**{**SEARCHED, "model": model, "gpus": 2, "memory": memory}, faults=faults)


@pytest.mark.parametrize(("rank", "fault"), [(0, "load:1"), (1, "load:3"), (1, "step:3")])
def test_before_a_size_is_tried_it_is_one_diagnosis(
    start: Callable[..., Server], shared_model: Path, rank: int, fault: str
) -> None:
    server = begin(start, shared_model, rank, fault)
    assert server.end(SECONDS) == 40, server.output()
    ended = server.termination()
    assert f"rank {rank} of 2" in ended["message"], ended["message"]
    assert ended["name"] == "OutOfMemory" and ended["knobs"]
    assert not leftovers(server)


def test_states_that_one_rank_cannot_have_are_one_diagnosis_of_what_asks_for_them(
    start: Callable[..., Server], hybrid_model: Path
) -> None:
    """The weights fitted. How much the device lacked is not known: by what is free nothing was."""
    server = begin(start, hybrid_model, 1, "states:1")
    assert server.end(SECONDS) == 40, server.output()
    ended = server.termination()
    assert ended["message"].startswith("the recurrent states of 4 requests and 8 prefix snapshots")
    assert "rank 1 of 2" in ended["message"], ended["message"]
    assert ended["name"] == "OutOfMemory"
    assert ended["knobs"] == [
        {"field": "spec.engine.maxRunningRequests", "direction": "lower"},
        {"field": "spec.engine.prefixSnapshots", "direction": "lower"},
    ]
    assert not leftovers(server)


@pytest.mark.parametrize(
    ("rank", "fault", "starts"),
    [
        (1, "resize:3", 1),  # as the whole KV cache is mapped
        # In a step of all: they wait for each other, and start anew.
        (0, f"step:{2 * STRESS + 2}", 2),
        (1, f"step:{2 * STRESS + 2}", 2),
    ],
)
def test_a_size_that_one_rank_cannot_bear_is_made_smaller_on_all(
    start: Callable[..., Server], shared_model: Path, rank: int, fault: str, starts: int
) -> None:
    server = begin(start, shared_model, rank, fault)
    server.wait(seconds=SECONDS)
    report: dict[str, Any] = server.probe("/sizing?version=2")[1]
    first, second = [each for each in report["attempts"] if each["number"]]
    assert (first["outcome"], second["outcome"]) == ("OutOfMemory", "Survived")
    smaller = first["targetTokens"] * 95 // 100 // 16 * 16
    assert report["result"]["kvTokens"] == second["targetTokens"] == smaller
    assert len(report["result"]["ranks"]) == 2
    assert f"kvline_engine_starts_total {starts}.0" in server.probe("/metrics")[1]
    assert server.complete(prompt="hello", max_tokens=1)["usage"]["completion_tokens"] == 1


def test_a_rank_killed_for_memory_while_validating_makes_all_go_on_smaller(
    start: Callable[..., Server], shared_model: Path
) -> None:
    server = begin(start, shared_model, 1, f"{2 * STRESS + 1}:kill", "STEP")
    server.wait(seconds=SECONDS)
    report = server.sizing()
    first, *others = [each for each in report["attempts"] if each["number"]]
    assert first["outcome"] == "Killed"
    # The new start does not measure before it tries that; what is free may differ a little.
    *refused, last = others
    assert last["outcome"] == "Survived", report
    assert {a["outcome"] for a in refused} <= {"OutOfMemory"}, report
    assert others[0]["targetTokens"] == first["targetTokens"] * 95 // 100 // 16 * 16
    assert report["result"]["kvTokens"] == last["targetTokens"]


@pytest.mark.parametrize(
    ("fault", "code", "text"),
    [
        ("device", 43, "rank 1 of 2: the device failed at launch: CUDA error"),
        ("raise", 50, "rank 1 ended with code 1: RuntimeError: injected"),
    ],
)
def test_what_ends_a_rank_while_serving_is_what_ends_the_pod(
    start: Callable[..., Server], shared_model: Path, fault: str, code: int, text: str
) -> None:
    """Rank 0 waits for it in that step, a request's."""
    faults = {"KVLINE_FAULT_STEP": f"{2 * STRESS + 1}:{fault}", "KVLINE_FAULT_RANK": "1"}
    server = start(model=shared_model, gpus=2, faults=faults)
    server.wait()
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 9}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=limit(30))
    assert answer.status_code == 500
    assert server.end(10) == code, server.output()
    assert text in server.termination()["message"]
    assert not leftovers(server)


def test_a_device_that_fails_in_a_joint_step_of_the_validation_ends_the_pod_at_once(
    start: Callable[..., Server], shared_model: Path
) -> None:
    """Of rank 0, inside what is held, while the others wait for it: its own error ends all."""
    server = start(model=shared_model, gpus=2, faults={"KVLINE_FAULT_STEP": "2:device"})
    assert server.end(20) == 43, server.output()
    assert "rank 0: the device failed at launch: CUDA error" in server.termination()["message"]
    assert not leftovers(server)
