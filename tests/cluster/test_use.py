"""Two test runs do not share a cluster: the second would take it down under the first's tests."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    module = importlib.import_module("local")
    monkeypatch.setattr(module, "CLUSTERS", tmp_path)
    return module


def claimed_elsewhere(clusters: Path) -> subprocess.CompletedProcess[str]:
    """By another process, by hand."""
    program = (
        f"import sys, pathlib; sys.path.insert(0, {str(FOLDER)!r}); import local; "
        f"local.CLUSTERS = pathlib.Path({str(clusters)!r}); local.LocalCluster('x').claim_use()"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)


def test_a_cluster_that_a_run_uses_is_not_taken_by_another(local: Any, tmp_path: Path) -> None:
    mine = local.LocalCluster("x")
    mine.claim_use()
    refused = claimed_elsewhere(tmp_path)
    assert refused.returncode and f"is used by process {os.getpid()}" in refused.stderr
    local.LocalCluster("y").claim_use()
    os.close(mine.lock)  # as at the end of its process
    assert claimed_elsewhere(tmp_path).returncode == 0
    local.LocalCluster("x").claim_use()
