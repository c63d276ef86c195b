"""Which terminations of a pod's server container were failures of its engine. Kubernetes
counts restarts for any reason, and keeps only the last termination. Pure.

A termination is known by its number, from 1, and is counted once however often it is observed.
"""

from __future__ import annotations

from dataclasses import replace

from kvline_contract.codec import document, field

MAX_PODS, MAX_ENDS = 32, 16


@document
class Ends:
    """Numbers of one container's terminations."""

    failed: tuple[int, ...] = field(items=MAX_ENDS, default=())  # with an exit code that rejects
    oom_killed: tuple[int, ...] = field(items=MAX_ENDS, default=())

    def with_failure(self, number: int) -> Ends:
        return replace(self, failed=_with(self.failed, number))

    def with_oom_kill(self, number: int) -> Ends:
        return replace(self, oom_killed=_with(self.oom_killed, number))


PodEnds = dict[str, Ends]  # by pod UID


def without_empty(found: PodEnds) -> PodEnds:
    return dict([(uid, ends) for uid, ends in found.items() if ends != Ends()][:MAX_PODS])


def _with(numbers: tuple[int, ...], number: int) -> tuple[int, ...]:
    return tuple(sorted({*numbers, number})[-MAX_ENDS:])
