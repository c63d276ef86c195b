"""Cgroups go while a cluster is ended, with the processes in them."""

from __future__ import annotations

import importlib
import os
import shutil
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    module = importlib.import_module("cgroups")
    monkeypatch.setattr(module, "MOUNT", tmp_path)
    (tmp_path / "cgroup.controllers").touch()
    return module


def test_a_group_that_goes_meanwhile_is_passed_over(
    cgroups: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pods = {str(pid): tmp_path / "kvline" / "kubepods" / f"pod{pid}" for pid in (11, 12, 13)}
    for pid, folder in pods.items():
        folder.mkdir(parents=True)
        (folder / "cgroup.procs").write_text(pid)
    killed: list[int] = []

    def kill(pid: int, _signal: int) -> None:
        killed.append(pid)
        for other in set(pods) - {str(pid)}:
            shutil.rmtree(pods[other], ignore_errors=True)

    monkeypatch.setattr(os, "kill", kill)
    listed = os.scandir

    def scandir(path: Any) -> Any:
        """As a group that goes between the listing of its parent and its own."""
        if str(path).endswith("pod13"):
            raise FileNotFoundError(path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    cgroups.kill_all("kvline")
    assert len(killed) == 1


def test_removes_the_inner_groups_first(cgroups: Any, tmp_path: Path) -> None:
    (tmp_path / "kvline" / "kubepods" / "pod1").mkdir(parents=True)
    cgroups.remove("kvline")
    assert not (tmp_path / "kvline").exists()
