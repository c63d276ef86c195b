"""The number of replicas of each revision's Deployment. Pure arithmetic on counts.

Surge: one replica of the candidate starts in addition to the stable ones and is measured; after its
gate has passed, each ready replica of the candidate replaces a stable one. Replace: one stable
replica is removed first, so that never more than spec.replicas run. Recreate: all stable replicas
are removed first. No replica is removed before the candidate is prepared (its image and model are
available), and removed replicas come back if the candidate does not become ready in time; see
deadline.py. Other revisions, left over from a spec that changed during a rollout, are scaled down
as the stable replicas become ready.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kvline_operator.api.spec import OnFailure, Rollout, Strategy
from kvline_operator.observe.children import DeploymentState
from kvline_operator.store.verdict import Phase, Verdict


@dataclass(frozen=True)  # no slots: what is derived is kept
class RolloutPlan:
    replicas: dict[str, int]  # revision -> desired replicas; Deployments of others are deleted
    stable: str
    candidate: str = ""  # empty where no rollout is in progress
    gate: Verdict | None = None  # of the candidate or of the rejected revision
    rejected: str = ""  # the revision of the spec, scaled down because its gate rejected it
    paused: bool = False

    @cached_property
    def newest(self) -> str:
        """The revision that is to run: the candidate, else the stable one."""
        return self.candidate or self.stable

    @cached_property
    def closed(self) -> str:
        """The candidate, while its gate has not passed: its replicas take no traffic."""
        passed = self.gate is not None and self.gate.phase is Phase.PASSED
        return "" if passed else self.candidate

    @cached_property
    def serving(self) -> int:
        """Desired replicas that take traffic once ready."""
        return sum(count for name, count in self.replicas.items() if name != self.closed)


@dataclass(frozen=True, slots=True)
class Situation:
    wanted: str  # the revision of the current spec
    stable: str  # the revision accepted last; empty before the first
    replicas: int  # desired by the spec or the autoscaler
    existing: tuple[DeploymentState, ...]
    verdict: Verdict | None  # of `wanted`, where it is not stable
    prepared: bool = True  # image and model of `wanted` are available

    def ready(self, revision: str) -> int:
        return sum(s.ready for s in self.existing if s.revision == revision)

    def size(self, revision: str) -> int:
        return sum(s.replicas for s in self.existing if s.revision == revision)


def plan(now: Situation, policy: Rollout) -> RolloutPlan:
    verdict, wanted, stable = now.verdict, now.wanted, now.stable
    least = now.replicas - (0 if policy.strategy is Strategy.SURGE else 1)
    if verdict is None or not stable or stable == wanted:
        sizes = {wanted: now.replicas if now.prepared else 0}
        return RolloutPlan(_drained(sizes, now, least), wanted)
    if policy.paused:
        sizes = _drained(_paused_sizes(now, policy), now, least)
        return RolloutPlan(sizes, stable, wanted, verdict, paused=True)
    failed = verdict.phase is Phase.REJECTED and policy.on_failure is OnFailure.ROLLBACK
    if failed or verdict.phase is Phase.EXPIRED:
        sizes = _drained({stable: now.replicas}, now, least)
        return RolloutPlan(sizes, stable, "", verdict, rejected=wanted)
    if verdict.phase is Phase.PASSED and now.ready(wanted) >= now.replicas > 0:
        return RolloutPlan(_drained({wanted: now.replicas}, now, least), wanted, "", verdict)
    sizes = _sizes(now, policy, verdict) if now.prepared else {wanted: 0, stable: now.replicas}
    return RolloutPlan(_drained(sizes, now, least), stable, wanted, verdict)


def write_order(
    replicas: dict[str, int], existing: tuple[DeploymentState, ...]
) -> list[tuple[str, int]]:
    """The order in which Deployments are written: new ones first, so that nothing is removed before
    the API server has accepted them; then those that scale down, which frees room for those that
    scale up."""
    before = {s.revision: s.replicas for s in existing}

    def turn(item: tuple[str, int]) -> int:
        name, count = item
        return 0 if name not in before else 1 if count < before[name] else 2

    return sorted(replicas.items(), key=turn)


def _sizes(now: Situation, policy: Rollout, verdict: Verdict) -> dict[str, int]:
    """Replicas of the candidate and of the stable revision during a rollout."""
    ready = min(now.ready(now.wanted), now.replicas)
    if policy.strategy is Strategy.RECREATE:
        return {now.wanted: now.replicas, now.stable: 0}
    following = ready + 1 if verdict.phase is Phase.PASSED else max(1, ready)
    size = min(now.replicas, following)
    gone = size if policy.strategy is Strategy.REPLACE else ready
    return {now.wanted: size, now.stable: now.replicas - gone}


def _paused_sizes(now: Situation, policy: Rollout) -> dict[str, int]:
    """The candidate keeps its size, and the stable one stays whole but for what the candidate has
    taken: a pause stops neither repair nor scaling."""
    ready = min(now.ready(now.wanted), now.replicas)
    size = min(now.size(now.wanted), now.replicas)
    if policy.strategy is Strategy.SURGE:
        kept = min(now.size(now.stable), now.replicas)  # one that gets ready now takes no more
        return {now.wanted: size, now.stable: max(kept, now.replicas - ready)}
    if policy.strategy is Strategy.REPLACE:
        size = min(size, ready + 1)  # replicas that it lost come back as stable ones
    return {now.wanted: size, now.stable: now.replicas - size}


def _drained(sizes: dict[str, int], now: Situation, least: int) -> dict[str, int]:
    """`sizes` plus ready replicas of superseded revisions, as many as the others lack to have
    `least` replicas ready. Without surge `least` is one below the desired count: otherwise new and
    old replicas would wait for each other's resources. A scaled-down Deployment loses replicas that
    are not ready first."""
    lacking = least - sum(min(n, now.ready(r)) for r, n in sizes.items())
    for item in sorted(now.existing, key=lambda s: s.ready, reverse=True):
        if item.revision in sizes or not item.ready or lacking <= 0:
            continue
        sizes[item.revision] = min(item.ready, lacking)
        lacking -= sizes[item.revision]
    return sizes
