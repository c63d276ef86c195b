"""Of several ranks the first end with a meaning is the pod's; the rest are its consequences."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvline_contract.exits import ExitCode
from kvline_contract.report import Termination
from kvline_server.ipc.messages import Channel, Pulse
from kvline_server.ipc.starvation import Quiet
from kvline_server.options.options import Options
from kvline_server.parent import engine
from kvline_server.parent.children import Child
from kvline_server.parent.engine import LOST, End, meeting_folder
from kvline_server.parent.engine import EngineProcesses as Processes

SILENT = 30.0


def report(code: ExitCode, text: str = "reported") -> Termination:
    return Termination.of(code, text)


def end(
    codes: dict[int, int], *reported: tuple[int, Termination], silent: int | None = None
) -> End:
    return End(3, codes, reported, "", silent)


def test_a_failure_that_a_rank_reports_is_the_reason_whatever_else_ended() -> None:
    lost = (0, report(ExitCode.RANK_LOST))
    invalid, memory = (2, report(ExitCode.MODEL_INVALID)), (1, report(ExitCode.OUT_OF_MEMORY))
    assert end({0: LOST, 1: -9}, lost, invalid, memory).failure() == invalid
    assert end({0: LOST, 1: -9}, lost).failure() is None


@pytest.mark.parametrize(
    ("found", "code", "text"),
    [
        (end({0: 1, 2: -9}), ExitCode.RANK_LOST, "rank 2 ended with signal 9, which the kernel"),
        (end({1: -11}), ExitCode.RANK_LOST, "rank 1 ended with signal 11"),
        (
            end({0: LOST, 1: -9}, (0, report(ExitCode.RANK_LOST))),
            ExitCode.RANK_LOST,
            "rank 1 ended",
        ),
        (end({}, silent=1), ExitCode.RANK_LOST, "rank 1 has not answered for 30 s"),
        (end({1: 1}), ExitCode.ENGINE_DIED, "rank 1 ended with code 1"),
        (end({0: LOST, 1: 1}, (0, report(ExitCode.RANK_LOST))), ExitCode.ENGINE_DIED, "rank 1"),
        (end({0: LOST}, (0, report(ExitCode.RANK_LOST))), ExitCode.RANK_LOST, "reported"),
        (end({1: LOST}), ExitCode.RANK_LOST, "rank 1 has ended"),
    ],
)
def test_a_lost_rank_is_named(found: End, code: ExitCode, text: str) -> None:
    ended = found.lost(SILENT)
    assert ended.code == code and ended.message.startswith(text)


def test_a_folder_where_ranks_meet_is_removed_by_a_later_parent_alone(tmp_path: Path) -> None:
    """A second server in the same state folder removed that of the first, which still started."""
    host = socket.gethostname()
    of_others = [f"ranks-{host}-{os.getppid()}-a", f"ranks-{host}-2-{os.getpid()}-a"]
    of_the_dead = [f"ranks-{host}-{os.getpid()}-a", f"ranks-{host}-{1 << 30}-a"]
    for name in of_others + of_the_dead:
        (tmp_path / name).mkdir()
    made = meeting_folder(tmp_path)
    assert not list(made.iterdir())
    assert {path.name for path in tmp_path.iterdir()} == {*of_others, made.name}


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Processes]]:
    """Starts processes of ranks that run these commands of a shell."""
    made: list[Processes] = []
    ends: list[socket.socket] = []

    def begin(*commands: str) -> Processes:
        children = []
        for command in commands:
            ours, theirs = socket.socketpair()
            ends.append(ours)
            with theirs:  # at the end of its process nothing more can come
                words, fd = ["sh", "-c", command], theirs.fileno()
                process = subprocess.Popen(words, pass_fds=(fd,))
            children.append(Child(process, Channel(ours), []))
        monkeypatch.setattr(engine, "start_engine", lambda *given: children)
        options = Options(config=tmp_path, state_dir=tmp_path)
        made.append(Processes(options, 1, len(commands), lambda rank, message: None))
        return made[-1]

    yield begin
    for processes in made:
        processes.kill()
    for end in ends:
        end.close()


def test_a_rank_that_exits_after_those_that_lost_it_is_the_reason(
    begin: Callable[..., Processes],
) -> None:
    """A process that fails closes its connections some time before it is gone."""
    processes = begin(f"exit {LOST}", "sleep 0.4; exit 1")
    processes.first.process.wait()
    assert processes.over()
    assert processes.end(None).lost(SILENT).message == "rank 1 ended with code 1"


@pytest.mark.parametrize("rank", range(3))
def test_a_rank_whose_pulse_ends_is_silent(begin: Callable[..., Processes], rank: int) -> None:
    processes = begin(*["sleep 60"] * 3)
    assert processes.without_pulse() == (0, 1, 2) and processes.silent(SILENT) is None
    for each in range(3):
        processes._from(each, Pulse())
    assert processes.without_pulse() == () and processes.silent(SILENT) is None
    processes._pulses[rank] -= SILENT
    assert processes.silent(SILENT) == rank


def test_a_rank_s_first_pulse_may_come_while_others_are_judged(
    begin: Callable[..., Processes],
) -> None:
    """The parent ended with «dictionary changed size during iteration»."""

    class Judged(Quiet):
        def seconds(self) -> float:
            processes._from(1, Pulse())
            return 0.0

    processes = begin(*["sleep 60"] * 2)
    processes._quiet[0] = Judged(time.monotonic)
    assert processes.silent(SILENT) is None and processes.without_pulse() == (0,)
