"""Stored: which terminations of a candidate's containers were external kills (by the kubelet or the
node), so that they do not count as failures of its engine. Kubernetes keeps a restart count and the
last termination only. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

MAX_PODS, MAX_ENDS = 32, 16
Kills = dict[str, tuple[int, ...]]  # by pod UID: ordinal numbers of such terminations, from 1


def merge(kept: Kills, living: Iterable[str], killed: Iterable[tuple[str, int]]) -> Kills:
    """`kept` for pods that still exist, plus the kills observed now."""
    found = {uid: set(kept.get(uid, ())) for uid in list(living)[:MAX_PODS]}
    for uid, number in killed:
        if uid in found:
            found[uid].add(number)
    return {uid: tuple(sorted(n)[-MAX_ENDS:]) for uid, n in found.items() if n}


def dumps(kills: Kills) -> str:
    return json.dumps(kills, sort_keys=True) if kills else ""


def parse(text: str) -> Kills:
    """Empty where the annotation is unreadable: then every termination counts."""
    try:
        found = json.loads(text) if text else {}
        return {str(uid): tuple(map(int, numbers)) for uid, numbers in found.items() if numbers}
    except (ValueError, TypeError, AttributeError, RecursionError):
        return {}
