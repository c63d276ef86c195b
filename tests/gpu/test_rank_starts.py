"""Starts on two GPUs as a user runs them: memory that one GPU alone lacks, at each stage."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from test_start import GIB, size

from kvline_server.kernels.attention import SHORT_CHUNKS
from kvline_server.memory.cuda import CudaDevice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs here"),
]
PROBE = 2 * (7 + len(SHORT_CHUNKS))  # steps, those of each rank alone included
FAULTS = Path(__file__).parents[1] / "server" / "faults"


def failing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rank: int, fault: str
) -> tuple[int, dict[str, Any], str]:
    """`size` on two GPUs; torch runs out of memory on this rank's, in the n-th call of a stage."""
    monkeypatch.setenv("PYTHONPATH", f"{FAULTS}:{os.environ['PYTHONPATH']}")
    monkeypatch.setenv("KVLINE_FAULT_MEMORY", fault)
    monkeypatch.setenv("KVLINE_FAULT_RANK", str(rank))
    monkeypatch.setenv("KVLINE_FAULT_DEVICE", "cuda")
    monkeypatch.setenv("KVLINE_FAULT_MARK", str(tmp_path / "fault"))
    return size(tmp_path, gpus=2)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", ["load:2", "tune:1", "capture:1", "resize:1"])
def test_what_one_gpu_lacks_before_a_size_is_tried_is_one_diagnosis(
    rank: int, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, report, output = failing(monkeypatch, tmp_path, rank, fault)
    assert code == 40, output
    assert f"rank {rank} of 2" in report["failure"]["message"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("fault", ["resize:2", "step:3"])
def test_what_one_gpu_lacks_once_in_the_probe_is_there_in_the_next(
    rank: int, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the probe is tried twice."""
    code, report, output = failing(monkeypatch, tmp_path, rank, fault)
    assert code == 0, output
    assert report["result"]["kvTokens"] > 100_000
    assert len(report["result"]["ranks"]) == 2
    assert (tmp_path / "fault").read_text() == fault, "it has not come"


@pytest.mark.parametrize(
    ("rank", "fault"), [(1, "resize:3"), (0, f"step:{PROBE + 1}"), (1, f"step:{PROBE + 2}")]
)
def test_a_size_that_one_gpu_cannot_bear_is_made_smaller_on_both(
    rank: int, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, report, output = failing(monkeypatch, tmp_path, rank, fault)
    assert code == 0, output
    first, second = [each for each in report["attempts"] if each["number"]]
    assert (first["outcome"], second["outcome"]) == ("OutOfMemory", "Survived")
    smaller = first["targetTokens"] * 95 // 100 // 16 * 16
    assert report["result"]["kvTokens"] == second["targetTokens"] == smaller
    assert len(report["result"]["ranks"]) == 2


def test_a_neighbour_on_one_gpu_lowers_the_size_of_both_and_is_named(tmp_path: Path) -> None:
    CudaDevice().settle()
    _, alone, _ = size(tmp_path, gpus=2)
    torch.cuda.set_device(1)
    try:
        with CudaDevice().held(20 * GIB):
            code, beside, _ = size(tmp_path, gpus=2)
    finally:
        torch.cuda.set_device(0)
    assert code == 0
    tokens = [r["result"]["kvTokens"] for r in (alone, beside)]
    lost = (tokens[0] - tokens[1]) * alone["result"]["bytesPerToken"]
    assert abs(lost - 20 * GIB) < GIB
    assert any("GPU 1 (rank 1 of 2) limits every rank" in text for text in beside["warnings"])
