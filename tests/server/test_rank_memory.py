"""Memory that torch refuses on one of several ranks, at each stage of a start: all shrink to one
figure, or all end with one diagnosis that names the rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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
