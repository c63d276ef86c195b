"""How ranks are connected, and what they are warned of."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed

from kvline_contract.launch import Device
from kvline_server.errors import RankLost
from kvline_server.parallel import nccl, symmetric
from kvline_server.parallel.connect import connect
from kvline_server.parallel.gloo import GlooGroup
from kvline_server.worker.graphs.steps import most_rows


def connected(device: Device, folder: Path) -> tuple[Any, list[str]]:
    warnings: list[str] = []
    return connect(device, 0, 1, folder, 64, torch.float32, warnings.append), warnings


def reach(monkeypatch: pytest.MonkeyPatch, each_other: bool) -> None:
    """In the place of a module that imports the driver's."""
    driver = SimpleNamespace(reachable=lambda gpus: each_other)
    monkeypatch.setitem(sys.modules, "kvline_server.memory.cuda", driver)


def test_gpus_that_reach_each_other_share_their_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach(monkeypatch, True)
    monkeypatch.setattr(symmetric, "SymmetricGroup", lambda *given: given)
    assert connected(Device.CUDA, tmp_path) == ((0, 1, tmp_path, 64, torch.float32), [])


def test_gpus_that_do_not_are_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reach(monkeypatch, False)
    monkeypatch.setattr(nccl, "NcclGroup", lambda *given: given)
    group, (warning,) = connected(Device.CUDA, tmp_path)
    assert group == (0, 1, tmp_path, 64, torch.float32)
    assert warning.startswith(
        "the GPUs cannot map each other's memory, or not change it atomically"
    )


def test_a_gpu_whose_ranks_do_not_come_is_a_lost_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(*given: object) -> None:
        raise torch.distributed.DistStoreError("wait timeout after 60000ms\nException raised from")

    reach(monkeypatch, True)
    monkeypatch.setattr(symmetric, "SymmetricGroup", late)
    with pytest.raises(RankLost, match=r"^rank 0 of 1 waits .* in vain: wait .*ms$"):
        connected(Device.CUDA, tmp_path)


def test_processes_on_a_cpu_talk_over_the_loopback_interface(tmp_path: Path) -> None:
    group, warnings = connected(Device.CPU, tmp_path)
    assert isinstance(group, GlooGroup) and not warnings
    group.close()


@pytest.mark.parametrize(
    ("running", "rows"), [(1, 1), (3, 4), (100, 128), (512, 512), (513, 576), (2000, 1024)]
)
def test_the_largest_graph_of_decodes_may_have_more_rows_than_requests(
    running: int, rows: int
) -> None:
    assert most_rows(running) == rows
