"""The processes of one engine, one for each rank: started together, watched, and ended together."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvline_contract.exits import ExitCode
from kvline_contract.report import Termination
from kvline_server.ipc.messages import Message, Progress, Pulse, StepFailed
from kvline_server.ipc.starvation import Quiet
from kvline_server.options.arguments import GrammarService
from kvline_server.options.options import Options
from kvline_server.parent.children import Child, hear_last_words, start_engine

FOLDER = "ranks-"
LOST = int(ExitCode.RANK_LOST)
REASON_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class End:
    """What is known of an engine's end before its other processes are killed."""

    ranks: int
    codes: dict[int, int]  # by rank, of those that ended
    reported: tuple[tuple[int, Termination], ...]  # in their order, with the rank
    step_failed: str  # errors.StepFailed, if it was that
    silent: int | None  # a rank without a pulse

    def failure(self) -> tuple[int, Termination] | None:
        """The first that was reported, with its rank; that another rank ended is none."""
        return next((each for each in self.reported if each[1].code != LOST), None)

    def killed(self) -> tuple[int, int] | None:
        """The first rank that a signal ended, with its code."""
        return next(((rank, code) for rank, code in self.codes.items() if code < 0), None)

    def lost(self, seconds: float) -> Termination:
        """Why one of several ranks is lost, where no failure was reported; `seconds` are those in
        which a silent one sent no pulse."""
        if (killed := self.killed()) is not None:
            how = signal_name(killed[1])
            return Termination.of(ExitCode.RANK_LOST, f"rank {killed[0]} ended with {how}")
        if self.silent is not None:
            text = f"rank {self.silent} has not answered for {seconds:g} s"
            return Termination.of(ExitCode.RANK_LOST, text)
        reporters = {rank for rank, _ in self.reported}
        for rank, code in self.codes.items():
            if code != LOST and rank not in reporters:
                text = f"rank {rank} ended with code {code}"
                return Termination.of(ExitCode.ENGINE_DIED, text)
        if self.reported:
            return self.reported[0][1]
        return Termination.of(ExitCode.RANK_LOST, f"rank {min(self.codes)} has ended")


def signal_name(code: int) -> str:
    """Of the signal that ended a process, none that the kernel sent for memory."""
    why = ", which the kernel did not send for memory" if code == -signal.SIGKILL else ""
    return f"signal {-code}{why}"


def meeting_folder(state: Path) -> Path:
    """A new folder where ranks meet. Removes those of parents on this host that were killed; in a
    container a parent has its predecessor's pid. Another server may use the same state folder."""
    host, own = socket.gethostname(), os.getpid()
    for old in state.glob(f"{FOLDER}*-*-*"):
        where, pid, _ = old.name.rsplit("-", 2)
        gone = pid == str(own) or not Path("/proc", pid).exists()
        if where == f"{FOLDER}{host}" and gone:
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{FOLDER}{host}-{own}-", dir=state))


class EngineProcesses:
    def __init__(
        self,
        options: Options,
        http_processes: int,
        ranks: int,
        handle: Callable[[int, Message], None],
        grammars: GrammarService | None = None,
        pixel_fds: Sequence[int] = (),
    ) -> None:
        """Starts them. `handle` gets each message that is not about a rank's end, with the rank."""
        self.folder: Path | None = None
        if ranks > 1:
            self.folder = meeting_folder(options.state_dir)
        shared = grammars, pixel_fds
        self.ranks = start_engine(options, http_processes, ranks, self.folder, *shared)
        self._handle = handle
        self._reported: list[tuple[int, Termination]] = []
        self._step_failed = ""
        self._pulses: dict[int, float] = {}  # when each rank's last one came
        self._quiet: dict[int, Quiet] = {}  # of ranks that have sent one
        for rank, child in enumerate(self.ranks):
            child.follow(partial(self._from, rank))

    @property
    def first(self) -> Child:
        """Rank 0's process."""
        return self.ranks[0]

    @property
    def working(self) -> bool:
        return self.first.process.poll() is None

    def over(self) -> bool:
        """Whether a process has ended, or will."""
        failed = len(self.ranks) > 1 and bool(self._reported or self._step_failed)
        return failed or any(child.process.poll() is not None for child in self.ranks)

    @property
    def pids(self) -> list[int]:
        return [child.process.pid for child in self.ranks]

    def silent(self, seconds: float) -> int | None:
        """A rank that has sent no pulse for so long since its first one, though it could run."""
        known = list(self._quiet.items())  # a rank's first pulse may come meanwhile
        for rank, quiet in known:
            quiet.watch([self.ranks[rank].process.pid])
        return next((rank for rank, quiet in known if quiet.seconds() > seconds), None)

    def without_pulse(self) -> tuple[int, ...]:
        """Ranks that have sent none yet."""
        return tuple(rank for rank in range(len(self.ranks)) if rank not in self._pulses)

    def end(self, silent: int | None) -> End:
        """Kills what is left of it, without waiting: a driver takes time to free a GPU's memory."""
        if silent is None and self.over():
            self._wait_for_reason()
        codes = {rank: child.process.poll() for rank, child in enumerate(self.ranks)}
        for child in self.ranks:
            child.process.kill()
        ended = {rank: code for rank, code in codes.items() if code is not None}
        hear_last_words(self.ranks[rank] for rank in ended)
        return End(len(self.ranks), ended, tuple(self._reported), self._step_failed, silent)

    def _wait_for_reason(self) -> None:
        """Where ranks have ended that only lost another: that one is gone a moment later."""
        end = time.monotonic() + REASON_SECONDS
        while time.monotonic() < end and not self._step_failed:
            codes = {failure.code for _, failure in self._reported}
            codes |= {code for child in self.ranks if (code := child.process.poll()) is not None}
            if codes - {LOST}:
                return
            time.sleep(REASON_SECONDS / 50)

    def kill(self) -> None:
        for child in self.ranks:
            child.process.kill()
        for child in self.ranks:
            child.kill()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _from(self, rank: int, message: Message) -> None:
        if isinstance(message, Pulse):
            self._pulses[rank] = time.monotonic()
            if rank not in self._quiet:
                self._quiet[rank] = Quiet(lambda: self._pulses[rank])
        elif isinstance(message, StepFailed):
            self._step_failed = self._step_failed or message.text
        elif isinstance(message, Progress) and message.failure is not None:
            self._reported.append((rank, message.failure))
        else:
            self._handle(rank, message)
