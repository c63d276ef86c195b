"""Plan: how many replicas each revision's Deployment gets right now.

A new revision starts at full size beside the old ones; each of its ready replicas lets one old
replica go; old Deployments are removed when the new one is whole. Pure arithmetic on counts.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sized:
    """A revision's Deployment as it is."""

    revision: str
    replicas: int
    ready: int


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    replicas: dict[str, int]  # revision -> wanted replicas; an old one that is absent goes
    stable: str  # the revision whose figures count
    candidate: str  # on its way, or empty


def plan(wanted: str, replicas: int, existing: list[Sized]) -> RolloutPlan:
    """`existing` holds the Deployments there are, in any order."""
    ready = sum(s.ready for s in existing if s.revision == wanted)
    old = [s for s in existing if s.revision != wanted and s.replicas > 0]
    serving = [s for s in old if s.ready > 0]
    if ready >= replicas or not serving:
        # Nothing old serves, so nothing old is worth keeping.
        return RolloutPlan({wanted: replicas}, wanted, "")
    sizes = {wanted: replicas}
    left = replicas - ready
    for item in sorted(serving, key=lambda s: s.ready, reverse=True):
        sizes[item.revision] = min(item.replicas, left)
        # Kubernetes takes replicas that are not ready first, so this many ready ones stay.
        left -= min(sizes[item.revision], item.ready)
    stable = wanted if ready else max(serving, key=lambda s: s.ready).revision
    return RolloutPlan({r: n for r, n in sizes.items() if n or r == wanted}, stable, wanted)
