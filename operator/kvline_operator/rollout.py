"""Plan: how many replicas each revision's Deployment gets right now. Pure arithmetic on counts.

Surge: a candidate's first replica starts beside the ones that serve and is measured; once its gate
has passed, each of its ready replicas lets one of the others go. Recreate: the others go first.
Whatever is neither, left from a spec that changed on the way, goes as the stable ones are back.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvline_operator.gate import Outcome, Verdict
from kvline_operator.spec import OnFailure, Rollout, Strategy


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
    candidate: str = ""  # on its way
    gate: Verdict | None = None  # of the candidate, or of the one that was turned down
    rejected: str = ""  # turned down, and not run any more
    paused: bool = False


@dataclass(frozen=True, slots=True)
class Situation:
    wanted: str  # the revision that the spec means
    stable: str  # the one accepted last; empty before the first
    replicas: int
    existing: tuple[Sized, ...]  # the Deployments there are
    verdict: Verdict | None  # of `wanted`, where it is not stable

    def ready(self, revision: str) -> int:
        return sum(s.ready for s in self.existing if s.revision == revision)

    def size(self, revision: str) -> int:
        return sum(s.replicas for s in self.existing if s.revision == revision)


def plan(now: Situation, how: Rollout) -> RolloutPlan:
    verdict, wanted, stable = now.verdict, now.wanted, now.stable
    if verdict is None or not stable or stable == wanted:
        return RolloutPlan(_drained({wanted: now.replicas}, now), wanted)
    if how.paused:
        sizes = {stable: now.size(stable), wanted: now.size(wanted)}
        return RolloutPlan(_drained(sizes, now), stable, wanted, verdict, paused=True)
    if verdict.outcome is Outcome.FAIL and how.on_failure is OnFailure.ROLLBACK:
        sizes = _drained({stable: now.replicas}, now)
        return RolloutPlan(sizes, stable, "", verdict, rejected=wanted)
    if verdict.outcome is Outcome.PASS and now.ready(wanted) >= now.replicas > 0:
        return RolloutPlan(_drained({wanted: now.replicas}, now), wanted, "", verdict)
    return RolloutPlan(_drained(_sizes(now, how, verdict), now), stable, wanted, verdict)


def _sizes(now: Situation, how: Rollout, verdict: Verdict) -> dict[str, int]:
    """The candidate's and the stable one's, on the way."""
    ready = min(now.ready(now.wanted), now.replicas)
    if how.strategy is Strategy.RECREATE:
        return {now.wanted: now.replicas, now.stable: 0}
    if verdict.outcome is Outcome.PASS:
        return {now.wanted: min(now.replicas, ready + 1), now.stable: now.replicas - ready}
    first = min(1, now.replicas)
    return {now.wanted: max(first, ready), now.stable: now.replicas - ready}


def _drained(sizes: dict[str, int], now: Situation) -> dict[str, int]:
    """With revisions that nobody wants any more but that still serve: as many of their replicas as
    the wanted ones lack. Kubernetes takes replicas that are not ready first."""
    lacking = now.replicas - sum(min(n, now.ready(r)) for r, n in sizes.items())
    for item in sorted(now.existing, key=lambda s: s.ready, reverse=True):
        if item.revision in sizes or not item.ready or lacking <= 0:
            continue
        sizes[item.revision] = min(item.ready, lacking)
        lacking -= sizes[item.revision]
    return sizes
