"""Why a process ended, and whether that says something about the size that was tried."""

from __future__ import annotations

import signal

from kvline_contract.exits import ExitCode
from kvline_contract.launch import Device
from kvline_contract.report import Outcome, State, Termination
from kvline_server.memory.device import counts_own_kills, oom_kills
from kvline_server.parent.engine import End, signal_name
from kvline_server.parent.report_keeper import ReportKeeper


class Causes:
    def __init__(self, keeper: ReportKeeper, device: Device) -> None:
        self.keeper = keeper
        self.device = device
        self.interrupted = False  # the current attempt says nothing about its size
        self.thrashed = False  # the engine was killed here, for lack of memory
        self._oom_kills: int | None = None  # when the engine started

    def engine_starts(self) -> None:
        self._oom_kills, self.thrashed = oom_kills(), False

    def may_shrink(self, end: End) -> bool:
        """Whether the size that was tried was too large: the restarted engine reads the attempts
        and tries a smaller one. A GPU's KV cache takes no host memory."""
        if end.failure() is not None:
            return False
        tried = any(a.outcome is Outcome.RUNNING for a in self.keeper.report.attempts)
        killed = any(map(self._killed_for_memory, end.codes.values()))
        return tried and (bool(end.step_failed) or (self.device is Device.CPU and killed))

    def of_engine(self, end: End, pulse: float) -> Termination:
        """`pulse`: seconds in which a silent rank sent none."""
        if (failed := end.failure()) is not None:
            rank, failure = failed
            self.interrupted = rank > 0  # rank 0 has ended its attempt itself
            return failure
        if end.step_failed:
            return Termination.of(self._out_of_memory(), end.step_failed)
        if end.ranks == 1:
            return self.of_process("engine", end.codes[0])
        killed = end.killed()
        if killed is not None and self._killed_for_memory(killed[1]):
            return self.of_process(f"rank {killed[0]}", killed[1])
        self.interrupted = True
        return end.lost(pulse)

    def of_process(self, what: str, code: int) -> Termination:
        state = self.keeper.report.state
        for_memory = self._killed_for_memory(code)
        if for_memory and not (self.thrashed or counts_own_kills()):
            return Termination.of(
                ExitCode.ENGINE_DIED,
                f"the {what} process ended with signal 9 in state {state}; it may have been killed "
                "for memory: the kernel's count of such kills is not of this server alone",
            )
        if for_memory:
            return Termination.of(
                self._out_of_memory(),
                f"the {what} process was killed for host memory in state {state}; "
                "raise spec.resources.memory",
            )
        self.interrupted = True  # whatever ended it was not the size that was tried
        if code == int(ExitCode.OUT_OF_MEMORY_SERVING):
            return Termination.of(
                ExitCode.OUT_OF_MEMORY_SERVING, f"the {what} process ran out of memory"
            )
        how = signal_name(code) if code < 0 else f"code {code}"
        return Termination.of(ExitCode.ENGINE_DIED, f"the {what} process ended with {how}")

    def _killed_for_memory(self, code: int) -> bool:
        """Whether the kernel killed a process for host memory. Others send SIGKILL too; where the
        kernel's count cannot be read, memory is the likely cause."""
        if code != -signal.SIGKILL:
            return False
        kills = oom_kills()
        return self.thrashed or self._oom_kills is None or kills is None or kills > self._oom_kills

    def _out_of_memory(self) -> ExitCode:
        serving = self.keeper.report.state is State.VALIDATED
        return ExitCode.OUT_OF_MEMORY_SERVING if serving else ExitCode.OUT_OF_MEMORY
