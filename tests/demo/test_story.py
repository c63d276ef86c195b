"""The GPU story from end to end on the local node: every step that needs no GPU, with the same
expectations. A stranger reads what it prints; so does this test's output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_figures import FIGURES
from gpu_story import STEPS
from local import LocalCluster

pytestmark = [pytest.mark.rehearsal, pytest.mark.timeout(2400)]

ROOT = Path(__file__).resolve().parents[2]
NEED_A_GPU = ("neighbour",)


def rehearse(out: Path, *words: str) -> str:
    """Runs it as a user does, and returns what it prints, which is shown too."""
    environment = {**os.environ, "REHEARSAL": "1", "OUT_DIR": str(out)}
    environment["KVLINE_BENCH_RESULTS"] = str(out / "results.jsonl")
    command = [sys.executable, str(ROOT / "demo" / "gpu.py"), *words]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        lines = []
        for line in running.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    assert running.returncode == 0
    return "".join(lines)


def test_every_step_that_needs_no_gpu(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("the local cluster needs root")
    if LocalCluster("demo").is_up():
        pytest.skip("a demo is up, which has the addresses that this takes: make demo-down")
    try:
        printed = rehearse(tmp_path)
    finally:
        rehearse(tmp_path, "down")
    for name in NEED_A_GPU:
        title = f"{name}: {STEPS[name][0]}"
        assert printed.split(title)[1].split("\n")[1].strip() == "not run: needs a GPU"
    assert printed.count("not run:") == len(NEED_A_GPU)
    assert printed.count("\n      done (") == len(STEPS) - len(NEED_A_GPU)
    lines = (tmp_path / "results.jsonl").read_text().splitlines()
    assert {json.loads(line)["name"] for line in lines} == set(FIGURES)
    assert "Kv Tokens" in (tmp_path / "describe.txt").read_text()
    assert "rehearsal" in (tmp_path / "page" / "index.html").read_text()
