"""When stable replicas that were removed for a candidate come back. Pure.

Recreate and Replace remove stable replicas before the candidate is ready. If it is not ready
within spec.rollout.progressDeadlineSeconds, for any reason, the stable replicas come back. The
candidate is not run again until spec.rollout or spec.capacity changes (other than a number of
replicas) or it is promoted; a new spec.restartedAt makes another candidate. A Deployment's own
deadline does not fit: it also counts the time in which a candidate waited for resources, so that a
change of strategy from Surge to Recreate would be reverted at once.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from kvline_contract.times import stamp
from kvline_operator.api.spec import Rollout
from kvline_operator.plan.phase import Policy, has_expired
from kvline_operator.plan.rollout import RolloutPlan, Situation
from kvline_operator.store.revision_state import Expiry, RevisionState
from kvline_operator.store.verdict import MAX_MESSAGE, Phase, Verdict


def with_deadline(
    now: Situation,
    rollout: Rollout,
    policy: Policy,
    states: dict[str, RevisionState],
    time: datetime,
) -> Situation:
    """Marks the candidate's verdict as expired once its deadline has passed."""
    verdict = now.verdict
    if verdict is None:
        return now
    mine = states[now.wanted]
    if mine.expiry is not None and has_expired(mine, states[now.stable], policy):
        if verdict.promoted and rollout.promote == now.wanted and not mine.promotion_used:
            return now  # a promotion gives it one more try
        return replace(now, verdict=replace(verdict, expired=True, message=mine.expiry.message))
    if rollout.paused or not _overdue(verdict, now, rollout, mine, time):
        return now
    seconds = rollout.progress_deadline_seconds
    text = f"not ready within spec.rollout.progressDeadlineSeconds ({seconds}): {verdict.message}"
    return replace(now, verdict=replace(verdict, expired=True, message=text))


def _overdue(
    verdict: Verdict, now: Situation, rollout: Rollout, mine: RevisionState, time: datetime
) -> bool:
    if verdict.phase is Phase.PASSED and now.ready(now.wanted):
        return False  # it serves, and proceeds as resources become free
    since = _moment(mine.missing_since)
    return since is not None and time - since >= timedelta(
        seconds=rollout.progress_deadline_seconds
    )


def updated(
    states: dict[str, RevisionState],
    plan: RolloutPlan,
    now: Situation,
    policy: Policy,
    time: datetime,
) -> dict[str, RevisionState]:
    """All states after this reconcile, with the candidate's clock: since when stable replicas are
    missing without ready ones of the candidate in their place, and whether it has expired."""
    out = {name: replace(s, missing_since="", expiry=None) for name, s in states.items()}
    verdict, mine = plan.gate, states[now.wanted]
    if verdict is not None and verdict.phase is Phase.EXPIRED:
        expiry = Expiry(states[now.stable].accepted, verdict.message[:MAX_MESSAGE], policy.digest)
        out[now.wanted] = replace(out[now.wanted], expiry=expiry)
    elif plan.candidate and not plan.paused and _is_missing(now, plan):
        since = mine.missing_since if _moment(mine.missing_since) else stamp(time)
        out[now.wanted] = replace(out[now.wanted], missing_since=since)
    return out


def _is_missing(now: Situation, plan: RolloutPlan) -> bool:
    ready = now.ready(now.wanted)
    goes_on = ready > 0 and plan.gate is not None and plan.gate.phase is Phase.PASSED
    return not goes_on and plan.replicas.get(now.stable, 0) < now.replicas - ready


def _moment(text: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)
