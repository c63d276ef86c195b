"""Plan: how many replicas each revision's Deployment gets right now. Pure arithmetic on counts.

Surge: a candidate's first replica starts beside the ones that serve and is measured; once its gate
has passed, each of its ready replicas lets one of the others go. Replace: one of the others goes
first and the candidate is measured in its place, so that no more replicas run than are asked for.
Recreate: all the others go first. Nothing goes before the candidate is prepared (its image and its
model are there), and what went for one that does not get ready is brought back; deadline.py.
Whatever is neither, left from a spec that changed on the way, goes as the stable ones are back.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvline_operator.gate import GateResult, Verdict
from kvline_operator.spec import OnFailure, Rollout, Strategy


@dataclass(frozen=True, slots=True)
class DeploymentState:
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

    @property
    def newest(self) -> str:
        """The revision that is to run: the candidate, else the stable one."""
        return self.candidate or self.stable

    @property
    def serving(self) -> int:
        """Replicas that take traffic once they are ready: a candidate's before it has passed its
        gate do not."""
        passed = self.gate is not None and self.gate.result is GateResult.PASSED
        closed = "" if passed else self.candidate
        return sum(count for name, count in self.replicas.items() if name != closed)


@dataclass(frozen=True, slots=True)
class Situation:
    wanted: str  # the revision that the spec means
    stable: str  # the one accepted last; empty before the first
    replicas: int
    existing: tuple[DeploymentState, ...]  # the Deployments there are
    verdict: Verdict | None  # of `wanted`, where it is not stable
    prepared: bool = True  # the image and the model of `wanted` are where it will run

    def ready(self, revision: str) -> int:
        return sum(s.ready for s in self.existing if s.revision == revision)

    def size(self, revision: str) -> int:
        return sum(s.replicas for s in self.existing if s.revision == revision)


def plan(now: Situation, how: Rollout) -> RolloutPlan:
    verdict, wanted, stable = now.verdict, now.wanted, now.stable
    least = now.replicas - (0 if how.strategy is Strategy.SURGE else 1)
    if verdict is None or not stable or stable == wanted:
        sizes = {wanted: now.replicas if now.prepared else 0}
        return RolloutPlan(_drained(sizes, now, least), wanted)
    if how.paused:
        sizes = {stable: now.size(stable), wanted: now.size(wanted)}
        return RolloutPlan(_drained(sizes, now, least), stable, wanted, verdict, paused=True)
    failed = verdict.result is GateResult.REJECTED and how.on_failure is OnFailure.ROLLBACK
    if failed or verdict.expired:
        sizes = _drained({stable: now.replicas}, now, least)
        return RolloutPlan(sizes, stable, "", verdict, rejected=wanted)
    if verdict.result is GateResult.PASSED and now.ready(wanted) >= now.replicas > 0:
        return RolloutPlan(_drained({wanted: now.replicas}, now, least), wanted, "", verdict)
    sizes = _sizes(now, how, verdict) if now.prepared else {wanted: 0, stable: now.replicas}
    return RolloutPlan(_drained(sizes, now, least), stable, wanted, verdict)


def in_order(
    replicas: dict[str, int], existing: tuple[DeploymentState, ...]
) -> list[tuple[str, int]]:
    """In which order the Deployments are written. A new one first: nothing goes before the API
    server has accepted it. Then those that shrink, so that those that grow find their room."""
    before = {s.revision: s.replicas for s in existing}

    def turn(item: tuple[str, int]) -> int:
        name, count = item
        return 0 if name not in before else 1 if count < before[name] else 2

    return sorted(replicas.items(), key=turn)


def _sizes(now: Situation, how: Rollout, verdict: Verdict) -> dict[str, int]:
    """The candidate's and the stable one's, on the way."""
    ready = min(now.ready(now.wanted), now.replicas)
    if how.strategy is Strategy.RECREATE:
        return {now.wanted: now.replicas, now.stable: 0}
    following = ready + 1 if verdict.result is GateResult.PASSED else max(1, ready)
    size = min(now.replicas, following)
    gone = size if how.strategy is Strategy.REPLACE else ready
    return {now.wanted: size, now.stable: now.replicas - gone}


def _drained(sizes: dict[str, int], now: Situation, least: int) -> dict[str, int]:
    """With revisions that nobody wants any more but that still serve: as many of their replicas as
    the wanted ones lack of the `least` that are to be ready. Where nothing is spare that is one
    fewer than is asked for, or the two would wait for each other's room. Kubernetes takes replicas
    that are not ready first."""
    lacking = least - sum(min(n, now.ready(r)) for r, n in sizes.items())
    for item in sorted(now.existing, key=lambda s: s.ready, reverse=True):
        if item.revision in sizes or not item.ready or lacking <= 0:
            continue
        sizes[item.revision] = min(item.ready, lacking)
        lacking -= sizes[item.revision]
    return sizes
