"""Starts without progress: how long one may last, and what is known of one that lasts longer."""

from __future__ import annotations

from kvline_contract.exits import ExitCode
from kvline_contract.report import State, Termination

SLOW_SECONDS, SLOW_FACTOR = 30.0, 5.0


def patience(probed_ms: int | None, limit: float) -> float:
    """Seconds that one step of a validation on the CPU may take, from what the longest of the probe
    took: one that takes far longer than the same work took then is thrashing for lack of memory,
    and its engine is killed, as a failed attempt."""
    return limit if probed_ms is None else SLOW_SECONDS + SLOW_FACTOR * probed_ms / 1000


def of_a_start(
    state: State, seconds: float, ranks: int, silent: tuple[int, ...], http_started: bool
) -> Termination:
    """`seconds`: without progress, after which it ends; `silent`: ranks without any pulse."""
    text = f"no progress in state {state} for {seconds:.0f} s"
    if not http_started:
        return Termination.of(ExitCode.STALLED, f"{text}: the HTTP processes have not started")
    if ranks == 1:
        return Termination.of(ExitCode.STALLED, text)
    return Termination.of(ExitCode.RANK_LOST, f"{text}: {_hung(ranks, silent)}")


def _hung(ranks: int, silent: tuple[int, ...]) -> str:
    if not silent:
        return f"one of {ranks} ranks hangs"
    names = " and ".join(f"rank {rank}" for rank in silent)
    return f"{names} {'has' if len(silent) == 1 else 'have'} sent no pulse"
