"""A slow volume does not count as stalled: the engine reports loaded bytes as progress."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from servers import launch_config
from waiting import limit

from kvline_contract.launch import CapacityOptions, Device, EngineOptions, LaunchConfig
from kvline_contract.report import Current, SizingReport, Stage, State
from kvline_server.ipc.messages import Progress
from kvline_server.model.linear import Rows
from kvline_server.model.loader import SafetensorsSource
from kvline_server.options.options import Options
from kvline_server.options.timeouts import Timeouts
from kvline_server.parent import causes as module
from kvline_server.parent import stalls
from kvline_server.parent.engine import End, EngineProcesses
from kvline_server.parent.supervisor import Supervisor
from kvline_server.sizing import load
from kvline_server.sizing.settings import resolve
from kvline_server.worker.backend import open_backend

LIMIT = limit(1.5)


class Parent(Supervisor):
    """The parent's account of one engine, without processes: hears what the engine would send."""

    def __init__(self, config: Path) -> None:
        options = Options(config=config, state_dir=config.parent, timeouts=Timeouts(stage=LIMIT))
        super().__init__(options, LaunchConfig.parse(config.read_bytes()))
        self.engine = cast(EngineProcesses, object())
        self.seen: list[SizingReport] = []

    def send(self, message: Progress) -> None:
        self._from_engine(0, message)
        self.seen.append(self.keeper.report)


@pytest.fixture
def parent(make_model: Callable[..., Path], tmp_path: Path) -> Parent:
    engine, capacity = EngineOptions(256, 2, 64), CapacityOptions(kv_tokens=1024)
    launch = launch_config(make_model("llama", sharded=True), engine, capacity)
    (tmp_path / "launch.json").write_text(launch.dumps())
    return Parent(tmp_path / "launch.json")


def test_a_load_longer_than_the_limit_goes_on_while_bytes_arrive(
    parent: Parent, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = LaunchConfig.parse(parent.options.config.read_bytes())
    copy = SafetensorsSource.copy

    def throttled(self: SafetensorsSource, part: Rows, into: torch.Tensor, column: int = 0) -> None:
        time.sleep(LIMIT / 10)
        copy(self, part, into, column)

    monkeypatch.setattr(SafetensorsSource, "copy", throttled)
    monkeypatch.setattr(load, "REPORT_SECONDS", 0.1)
    model = load.read_model(launch)
    backend = open_backend(launch, 8 << 30, os.getpid(), lambda text: None)
    settings = resolve(launch, model, backend.device.limit)
    started = time.monotonic()
    loading = threading.Thread(
        target=load.load_model, args=(launch, model, settings, backend, parent.send)
    )
    loading.start()
    while loading.is_alive():
        assert parent._stalled() is None
        time.sleep(0.05)
    assert time.monotonic() - started > LIMIT
    updates = [r.stages for r in parent.seen if r.stages]
    assert all(len(stages) == 1 for stages in updates), (
        "each update of a stage replaces the one before"
    )
    running = [s for (s,) in updates if s.total_bytes is not None]
    done = [s.bytes for s in running]
    assert len(done) > 5 and done == sorted(set(done))
    assert all(s.bytes <= (s.total_bytes or 0) for s in running)
    assert updates[-1][0].total_bytes is None and updates[-1][0].ms > 1000 * LIMIT


def test_a_load_that_hangs_is_stalled_and_named(parent: Parent) -> None:
    parent.send(Progress(stage=Stage("load", 1, 10, total_bytes=100)))
    assert parent._stalled() is None
    parent.keeper.changed_at -= LIMIT
    parent.starting.watch([])
    ended = parent._stalled()
    assert ended is not None and ended.code == 52
    assert parent.keeper.report.state is State.LOADING
    assert ended.message == f"no progress in state Loading for {LIMIT:.0f} s"


@pytest.mark.parametrize(
    ("without", "text"),
    [
        ((), "one of 3 ranks hangs"),
        ((1,), "rank 1 has sent no pulse"),
        ((0, 2), "rank 0 and rank 2 have sent no pulse"),
    ],
)
@pytest.mark.parametrize("state", [State.LOADING, State.VALIDATING])
def test_a_start_of_several_ranks_that_hangs_has_lost_one(
    parent: Parent, without: tuple[int, ...], text: str, state: State
) -> None:
    """A rank that hangs says nothing about the revision, which a stalled start rejects."""
    parent.ranks, parent.device = 3, Device.CUDA
    parent.engine = cast(Any, SimpleNamespace(without_pulse=lambda: without))
    parent.keeper.apply(Progress(state=state))
    assert parent._stalled() is None
    parent.keeper.changed_at -= LIMIT
    parent.starting.watch([])
    ended = parent._stalled()
    assert ended is not None and (ended.code, ended.name) == (44, "RankLost")
    assert ended.message == f"no progress in state {state} for {LIMIT:.0f} s: {text}"
    assert parent.causes.interrupted


@pytest.mark.parametrize("device", [Device.CPU, Device.CUDA])
def test_a_validation_that_thrashes_is_killed_on_a_cpu_alone(
    parent: Parent, monkeypatch: pytest.MonkeyPatch, device: Device
) -> None:
    """A GPU that hung was reported as too little host memory."""
    killed: list[bool] = []
    parent.device = device
    first = SimpleNamespace(kill=lambda: killed.append(True))
    parent.engine = cast(Any, SimpleNamespace(first=first))
    parent.keeper.apply(Progress(state=State.VALIDATING))
    monkeypatch.setattr(stalls, "patience", lambda stages, limit: 0.0)
    parent.keeper.changed_at -= LIMIT
    parent.starting.watch([])
    ended = parent._stalled()
    assert killed == ([True] if device is Device.CPU else [])
    assert (ended is None) == (device is Device.CPU)
    assert ended is None or ended.code == 52


def test_two_stages_that_begin_between_two_polls_are_both_in_the_log(
    parent: Parent, capsys: pytest.CaptureFixture[str]
) -> None:
    now = parent.keeper.report.updated_at
    for stage, what in ((2, "warms up its kernels"), (3, "measures the largest steps")):
        parent._from_engine(0, Progress(current=Current(stage, 4, what, now)))
    logged = capsys.readouterr().err
    assert "stage 2 of 4: warms up" in logged and "stage 3 of 4: measures" in logged


def test_a_warning_of_another_rank_reaches_the_report(parent: Parent) -> None:
    parent._from_engine(1, Progress(warning="no prebuilt kernels"))
    parent._from_engine(2, Progress())
    assert parent.keeper.report.warnings == ("rank 1: no prebuilt kernels",)


@pytest.mark.parametrize(
    ("state", "code"), [(State.VALIDATED, 51), (State.LOADING, 40), (State.AUTOTUNING, 40)]
)
@pytest.mark.parametrize(
    ("end", "text"),
    [
        (End(2, {1: 51}, (), "rank 1: launch: none", None), "rank 1: launch: none"),
        (End(2, {0: 44, 1: -9}, (), "", None), "the rank 1 process was killed for host memory"),
    ],
)
def test_memory_that_ended_one_of_several_ranks_is_what_ends_the_pod(
    parent: Parent, monkeypatch: pytest.MonkeyPatch, state: State, code: int, end: End, text: str
) -> None:
    causes = parent.causes
    monkeypatch.setattr(causes, "_killed_for_memory", lambda code: code == -9)
    monkeypatch.setattr(module, "counts_own_kills", lambda: True)
    causes.keeper = cast(Any, SimpleNamespace(report=SimpleNamespace(state=state)))
    ended = causes.of_engine(end, LIMIT)
    assert ended.code == code and ended.message.startswith(text)
    assert not parent.causes.interrupted


@pytest.mark.parametrize("own", [True, False], ids=["in a container", "of the machine"])
def test_a_kill_is_blamed_on_memory_only_where_the_count_is_of_this_pod(
    parent: Parent, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """A kill -9 was, once the kernel had ended any process of the machine for memory."""
    kills = iter((3, 4))
    monkeypatch.setattr(module, "oom_kills", lambda: next(kills))
    monkeypatch.setattr(module, "counts_own_kills", lambda: own)
    parent.causes.engine_starts()
    ended = parent.causes.of_process("engine", -9)
    assert ended.name == ("OutOfMemory" if own else "EngineDied")
    assert ("may have been killed for memory" in ended.message) == (not own)
