"""Which terminations of a pod's server container were failures of its engine. Kubernetes
counts restarts for any reason, and keeps only the last termination. Pure.

A termination is known by its number, from 1, and is counted once however often it is observed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

MAX_PODS, MAX_ENDS = 32, 16


@dataclass(frozen=True, slots=True)
class Ends:
    """Numbers of one container's terminations."""

    failed: tuple[int, ...] = ()  # with an exit code that rejects
    oom_killed: tuple[int, ...] = ()

    def with_failure(self, number: int) -> Ends:
        return replace(self, failed=_with(self.failed, number))

    def with_oom_kill(self, number: int) -> Ends:
        return replace(self, oom_killed=_with(self.oom_killed, number))


PodEnds = dict[str, Ends]  # by pod UID


def without_empty(found: PodEnds) -> PodEnds:
    return dict([(uid, ends) for uid, ends in found.items() if ends != Ends()][:MAX_PODS])


def dumps(ends: PodEnds) -> str:
    lists = {uid: [e.failed, e.oom_killed] for uid, e in ends.items()}
    return json.dumps(lists, sort_keys=True) if lists else ""


def parse(text: str) -> PodEnds:
    """Empty where the annotation is unreadable: counting starts again."""
    try:
        found = json.loads(text) if text else {}
        return {
            str(uid): Ends(tuple(map(int, failed)), tuple(map(int, oom_killed)))
            for uid, (failed, oom_killed) in found.items()
        }
    except (ValueError, TypeError, AttributeError, RecursionError):
        return {}


def _with(numbers: tuple[int, ...], number: int) -> tuple[int, ...]:
    return tuple(sorted({*numbers, number})[-MAX_ENDS:])
