"""kvline-server size as a person runs it: a search, a record of it, a start from that record."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waiting import limit

from kvline_server.sizing.record import unreadable

pytestmark = pytest.mark.process


def size(folder: Path, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvline_server", "size", "--model", str(folder)]
    command += ["--device", "cpu", "--memory", "900Mi", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit(100), check=False)
    assert not check or done.returncode == 0, done.stderr[-2000:]
    return done


def stages(report: dict[str, Any]) -> set[str]:
    return {stage["name"].split()[0] for stage in report["stages"]}


@pytest.fixture(scope="module")
def searched(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The report of a search, and its record."""
    record = tmp_path_factory.mktemp("searched") / "records.json"
    found = json.loads(size(tiny_model, "--json", "--write-record", str(record)).stdout)
    return found, json.loads(record.read_text())


def test_a_size_is_the_same_beside_processes_that_end(
    tiny_model: Path, searched: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    """One that ended marked all pages of torch as referenced, also for those that go on: a start
    beside it measured half of its KV cache."""

    def tokens() -> int:
        return int(json.loads(size(tiny_model, "--json").stdout)["result"]["kvTokens"])

    alone = int(searched[0]["result"]["kvTokens"])
    loop = f"while :; do {sys.executable} -c 'import torch'; done"
    others = subprocess.Popen(["sh", "-c", loop], start_new_session=True)
    try:
        beside = [tokens() for _ in range(2)]
    finally:
        os.killpg(others.pid, signal.SIGKILL)
        others.wait()
    assert min(beside) > 0.95 * alone, (alone, beside)


def test_a_recorded_size_is_validated_and_not_searched(
    tiny_model: Path, tmp_path: Path, searched: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    record = tmp_path / "records.json"
    found, written = searched
    assert {"probe", "stress", "measure", "validate"} <= stages(found)
    kept = copy.deepcopy(written)
    assert list(kept["records"]) == [found["result"]["fingerprint"]]
    for made in kept["records"].values():
        made["freeMiB"] -= 4  # a start finds a few MiB less or more than the one before
        made["kvTokens"] -= 160
    record.write_text(json.dumps(kept))
    again = json.loads(size(tiny_model, "--json", "--record", str(record)).stdout)
    assert again["result"]["source"] == "Recorded"
    assert again["result"]["kvTokens"] == found["result"]["kvTokens"] - 160, again["attempts"]
    assert "stress" not in stages(again) and "validate" in stages(again)


def test_a_file_that_gives_no_record_is_warned_of(tiny_model: Path, tmp_path: Path) -> None:
    """It was ignored in silence, and cost a search. The length is cut to the cache here."""
    record = tmp_path / "records.json"
    record.write_text("precious")
    done = size(tiny_model, "--kv-tokens", "256", "--record", str(record))
    assert f"warning: --record {record}: not a JSON document" in done.stderr
    assert "1 full-length sequences of 256 of the model's 512" in " ".join(done.stdout.split())
    assert unreadable(tmp_path / "none") == f"{tmp_path / 'none'}: no such file"


def test_a_person_reads_stages_and_a_waterfall(tiny_model: Path) -> None:
    done = size(tiny_model, "--kv-tokens", "2048")
    assert "validate" in done.stderr and "6 steps, the longest " in " ".join(done.stderr.split())
    for part in ("weights", "headroom", "others", "total"):
        assert part in done.stdout
    assert "2048 KV tokens" in done.stdout and "Pinned" in done.stdout


def test_several_ranks_have_a_waterfall_each(tiny_model: Path) -> None:
    done = size(tiny_model, "--kv-tokens", "2048", "--gpus", "2", "--memory", "1800Mi")
    assert "rank 0 of 2" in done.stdout and "rank 1 of 2" in done.stdout
    assert "2048 KV tokens" in done.stdout
    refused = size(tiny_model, "--gpus", "3", check=False)
    assert refused.returncode == 32 and "--gpus is 3" in refused.stderr


def test_a_file_that_is_no_record_is_not_overwritten(tiny_model: Path, tmp_path: Path) -> None:
    record = tmp_path / "records.json"
    record.write_text("precious")
    done = size(tiny_model, "--kv-tokens", "2048", "--write-record", str(record), check=False)
    assert done.returncode != 0
    assert record.read_text() == "precious"
    assert "records.json" in done.stderr and "Traceback" not in done.stderr


def test_an_interrupted_search_is_no_success(tiny_model: Path) -> None:
    command = [sys.executable, "-m", "kvline_server", "size", "--model", str(tiny_model)]
    command += ["--device", "cpu", "--memory", "900Mi", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        process.stderr.readline()  # the first stage is shown once the engine runs
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=limit(100))
    assert (process.returncode, out) == (130, b"")
    assert b"interrupted" in error
