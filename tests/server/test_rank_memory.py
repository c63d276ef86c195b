"""Memory that torch refuses on one of several ranks, at each stage of a start: all shrink to one
figure, or all end with one diagnosis that names the rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import SEARCHED, Server
from test_rank_processes import leftovers

pytestmark = pytest.mark.process

SECONDS = 60.0


def begin(start: Callable[..., Server], model: Path, ranks: int, rank: int, fault: str) -> Server:
    """With room for torch's own memory in each process."""
    faults = {"KVLINE_FAULT_MEMORY": fault, "KVLINE_FAULT_RANK": str(rank)}
    memory = ranks * int(SEARCHED["memory"])
    return start(**{**SEARCHED, "model": model, "gpus": ranks, "memory": memory}, faults=faults)


@pytest.mark.parametrize(
    ("ranks", "rank", "fault"),
    [
        (2, 0, "load:1"),
        (2, 1, "load:3"),
        (3, 2, "tune:1"),
        (2, 1, "capture:1"),
        (2, 1, "resize:2"),  # the probe's
        (3, 2, "step:3"),  # of the stress
    ],
)
def test_before_a_size_is_tried_it_is_one_diagnosis(
    start: Callable[..., Server], shared_model: Path, ranks: int, rank: int, fault: str
) -> None:
    server = begin(start, shared_model, ranks, rank, fault)
    assert server.end(SECONDS) == 40, server.output()
    ended = server.termination()
    assert f"rank {rank} of {ranks}" in ended["message"], ended["message"]
    assert ended["name"] == "OutOfMemory" and ended["knobs"]
    assert not leftovers(server)


@pytest.mark.parametrize(
    ("ranks", "rank", "fault", "starts"),
    [
        (4, 3, "resize:3", 1),  # as the whole KV cache is mapped
        (2, 0, "step:13", 1),  # the first of the validation, each rank alone
        (2, 0, "step:14", 2),  # in the same step of all: they wait for each other, and start anew
        (2, 1, "step:14", 2),
    ],
)
def test_a_size_that_one_rank_cannot_bear_is_made_smaller_on_all(
    start: Callable[..., Server], shared_model: Path, ranks: int, rank: int, fault: str, starts: int
) -> None:
    server = begin(start, shared_model, ranks, rank, fault)
    server.wait(seconds=SECONDS)
    report: dict[str, Any] = server.probe("/sizing?version=2")[1]
    first, second = [each for each in report["attempts"] if each["number"]]
    assert (first["outcome"], second["outcome"]) == ("OutOfMemory", "Survived")
    smaller = first["targetTokens"] * 95 // 100 // 16 * 16
    assert report["result"]["kvTokens"] == second["targetTokens"] == smaller
    assert len(report["result"]["ranks"]) == ranks
    assert f"kvline_engine_starts_total {starts}.0" in server.probe("/metrics")[1]
    assert server.complete(prompt="hello", max_tokens=1)["usage"]["completion_tokens"] == 1


def test_a_rank_killed_for_memory_while_validating_makes_all_go_on_smaller(
    start: Callable[..., Server], shared_model: Path
) -> None:
    faults = {"KVLINE_FAULT_STEP": "13:kill", "KVLINE_FAULT_RANK": "1"}
    memory = 2 * int(SEARCHED["memory"])
    server = start(
        **{**SEARCHED, "model": shared_model, "gpus": 2, "memory": memory}, faults=faults
    )
    server.wait(seconds=SECONDS)
    report = server.sizing()
    first, second = [each for each in report["attempts"] if each["number"]]
    assert (first["outcome"], second["outcome"]) == ("Killed", "Survived")
    assert second["targetTokens"] == first["targetTokens"] * 95 // 100 // 16 * 16


@pytest.mark.parametrize(
    ("fault", "code", "text"),
    [
        ("oom", 51, "rank 1: launch: CUDA out of memory"),
        ("kill", 51, "rank 1 process was killed for host memory"),
        ("device", 43, "rank 1 of 2: the device failed at launch: CUDA error"),
        ("raise", 50, "rank 1 ended with code 1"),
    ],
)
def test_what_ends_a_rank_while_serving_is_what_ends_the_pod(
    start: Callable[..., Server], shared_model: Path, fault: str, code: int, text: str
) -> None:
    """Rank 0 waits for it in that step. A pinned start runs six steps, each rank alone and then
    together; the next one is a request's."""
    faults = {"KVLINE_FAULT_STEP": f"13:{fault}", "KVLINE_FAULT_RANK": "1"}
    server = start(model=shared_model, gpus=2, faults=faults)
    server.wait()
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 9}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
    assert answer.status_code == 500
    assert server.end(10) == code, server.output()
    assert text in server.termination()["message"]
    assert not leftovers(server)
