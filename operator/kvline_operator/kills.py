"""Remember: which ends of a candidate's containers came from outside, so that they are not counted
as its engine's own. Kubernetes counts restarts, and keeps the last end alone. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

MAX_PODS, MAX_ENDS = 32, 16
Kills = dict[str, tuple[int, ...]]  # by pod uid: the numbers of such ends, from 1


def merge(kept: Kills, living: Iterable[str], killed: Iterable[tuple[str, int]]) -> Kills:
    """What is kept of the pods that live, with the ends that were found killed now."""
    found = {uid: set(kept.get(uid, ())) for uid in list(living)[:MAX_PODS]}
    for uid, number in killed:
        if uid in found:
            found[uid].add(number)
    return {uid: tuple(sorted(n)[-MAX_ENDS:]) for uid, n in found.items() if n}


def dumps(kills: Kills) -> str:
    return json.dumps(kills, sort_keys=True) if kills else ""


def parse(text: str) -> Kills:
    """Nothing where somebody made it unreadable: every end counts then."""
    try:
        found = json.loads(text) if text else {}
        return {str(uid): tuple(map(int, numbers)) for uid, numbers in found.items() if numbers}
    except (ValueError, TypeError, AttributeError, RecursionError):
        return {}
