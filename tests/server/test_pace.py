"""A size is refused whose steps would be taken for a hung engine, with the setting that helps."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from crowded import crowded_out
from simulated import SETTINGS, Machine, Notes

from kvline_contract.exits import ExitCode
from kvline_contract.report import Direction
from kvline_server.errors import StepTooLong
from kvline_server.memory.device import MIB
from kvline_server.sizing.loaded import Loaded
from kvline_server.sizing.profile import ProfileLoop
from kvline_server.sizing.record import AttemptStore
from kvline_server.sizing.settings import EngineSettings, least_rows
from kvline_server.worker.step import Step

PER_ROW, LIMIT = 0.001, 0.05
# Takes seconds of CPU time, for each line that says how many.
SPIN = """
import sys, time
for line in sys.stdin:
    end = time.process_time() + float(line)
    while time.process_time() < end:
        pass
    print(flush=True)
"""
# Runs a step of so many seconds of CPU time of another process, for which it waits as rank 0 does,
# and says how many it took by the clock.
WORK = """
import os, subprocess, sys, time
from types import SimpleNamespace
import numpy as np
from kvline_server.errors import StepTooLong
from kvline_server.sizing import pace
rank, pipe = [sys.executable, "-c", sys.argv[2]], subprocess.PIPE
rank = subprocess.Popen(rank, text=True, stdin=pipe, stdout=pipe)
def run(seconds=sys.argv[1]):
    print(seconds, file=rank.stdin, flush=True)
    rank.stdout.readline()
run("0")
step = SimpleNamespace(tokens=[0] * 16, layout=SimpleNamespace(positions=np.array([15])))
print(rank.pid, flush=True)
input()
began, refused = time.monotonic(), ""
try:
    pace.check(step, run, 0.4, None, [os.getpid(), rank.pid])
except StepTooLong as error:
    refused = error
print(time.monotonic() - began, refused, flush=True)
"""


@dataclass
class Slow(Machine):
    """A row takes its time, and a step some more, by the machine's own clock."""

    loads: float = 0.0  # seconds that the first run of each number of rows takes
    seconds: float = 0.0

    def launch(self, step: Step) -> Machine:
        seen = {len(other.tokens) for other in self.steps}
        rows = len(step.tokens)
        self.seconds += rows * PER_ROW + (0 if rows in seen else self.loads)
        return super().launch(step)


def start(folder: Path, wanted: EngineSettings, made: Slow, limit: float = LIMIT) -> None:
    ProfileLoop(
        device=made,
        settings=wanted,
        loaded=Loaded(made, 1000, made.owned, made.groups, made.stress, "f" * 32, "bfloat16"),
        send=Notes(),
        store=AttemptStore(folder / "attempts.json"),
        record_file=None,
        wait_for_neighbours=lambda: None,
        free_before_weights=(made.limit,),
        longest_step=limit,
        clock=lambda: made.seconds,
    ).run(0.0)


def slow(loads: float = 0.0) -> Slow:
    return Slow(limit=256 * MIB, weights=100 * MIB, price=64 << 10, loads=loads)


def test_a_step_that_is_too_long_is_refused_with_a_setting_that_starts(tmp_path: Path) -> None:
    with pytest.raises(StepTooLong) as refused:
        start(tmp_path, SETTINGS, slow())
    ended = refused.value.termination()
    assert ended.code == ExitCode.STEP_TOO_LONG and ExitCode.STEP_TOO_LONG.rejects
    (knob,) = ended.knobs
    assert (knob.spec_field, knob.direction) == ("spec.engine.maxPrefillTokens", Direction.LOWER)
    assert "a step of 128 rows" in ended.message and "took 0.128 s" in ended.message
    assert f"lower spec.engine.maxPrefillTokens to {knob.value}" in ended.message
    assert knob.value is not None and 16 <= knob.value < 50
    assert (
        not (tmp_path / "attempts.json").exists()
        or "Running" not in (tmp_path / "attempts.json").read_text()
    ), "the size did not fail"
    start(tmp_path, replace(SETTINGS, max_prefill_tokens=knob.value), slow())


def test_a_step_has_no_fewer_rows_than_run_at_once(tmp_path: Path) -> None:
    many = replace(SETTINGS, max_running_requests=64)
    with pytest.raises(StepTooLong) as refused:
        start(tmp_path, many, slow())
    knobs = {knob.spec_field.rpartition(".")[2]: knob.value for knob in refused.value.knobs}
    prefill, running = knobs["maxPrefillTokens"], knobs["maxRunningRequests"]
    assert prefill is not None and prefill == running
    assert [knob.with_next for knob in refused.value.knobs] == [True, None]
    lower = replace(many, max_prefill_tokens=prefill, max_running_requests=running)
    start(tmp_path, lower, slow())


def test_a_hybrid_s_step_has_room_for_a_chunk_beside_what_runs(tmp_path: Path) -> None:
    """Else the values that are offered would be refused by the next start."""
    many = replace(SETTINGS, max_running_requests=64, max_prefill_tokens=256, recurrent=True)
    with pytest.raises(StepTooLong) as refused:
        start(tmp_path, many, slow(), limit=0.13)
    prefill, running = (knob.value for knob in refused.value.knobs)
    assert prefill is not None and running is not None
    assert running < 64 and prefill == least_rows(running, recurrent=True)
    lower = " and lower spec.engine.maxRunningRequests to "
    assert f"lower spec.engine.maxPrefillTokens to {prefill}{lower}{running}" in str(refused.value)
    with pytest.raises(StepTooLong, match=r"lower spec\.engine\.maxModelLen$"):
        start(tmp_path, many, slow(), limit=0.05)


def test_a_context_that_takes_too_long_whatever_the_rows_is_named(tmp_path: Path) -> None:
    with pytest.raises(StepTooLong, match=r"lower spec\.engine\.maxModelLen$"):
        start(tmp_path, SETTINGS, slow(), limit=0.001)


def test_the_time_of_a_first_run_does_not_count(tmp_path: Path) -> None:
    """Kernels are loaded then, where a size is pinned or recorded and nothing was probed."""
    pinned = replace(SETTINGS, max_prefill_tokens=16, pinned_kv_tokens=2048)
    made = slow(loads=0.2)
    start(tmp_path, pinned, made, limit=0.15)
    assert len(made.steps) > len({len(step.tokens) for step in made.steps})


@pytest.mark.process
@pytest.mark.parametrize(("seconds", "busy"), [("0.2", True), ("0.8", False)])
def test_what_a_busy_node_gives_to_others_does_not_count(seconds: str, busy: bool) -> None:
    """Of any rank: rank 0 has all the CPU it wants while it waits for another one."""
    command, pipe = [sys.executable, "-c", WORK, seconds, SPIN], subprocess.PIPE
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None and process.stdin is not None
        rank = int(process.stdout.readline())
        with crowded_out(rank) if busy else nullcontext():
            process.stdin.write("\n")
            process.stdin.flush()
            took, _, refused = process.stdout.readline().partition(" ")
    assert float(took) > 0.4 and bool(refused.strip()) != busy
