"""After how many seconds without progress what ends. Tests shorten them."""

from __future__ import annotations

from dataclasses import dataclass

from kvline_contract import names


@dataclass(frozen=True, slots=True)
class Timeouts:
    """In seconds."""

    # Without progress, but for what processes were starved of CPU (starvation.py).
    stage: float = 300.0  # of a start, which ends then
    liveness: float = 60.0  # without a step while busy, or without a heartbeat of the event loop
    # Where the launch sets none; preStop + drain + 5 s to exit < the grace period.
    drain: float = 120.0
    leave: float = names.PRE_STOP_SECONDS  # until the last client knows that the pod ends
    rank: float = 30.0  # without a pulse of one of several ranks
    grammars: float = 10.0  # without a pulse of the process that fills masks
    poll: float = 0.1
    gate: float = 1.0

    @property
    def step(self) -> float:
        """The longest that one may take: longer ones take a pod out of the endpoints."""
        return self.liveness / 2


LONGEST_STEP = Timeouts().step
