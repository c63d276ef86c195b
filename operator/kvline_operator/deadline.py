"""Plan: when replicas that were taken away for a candidate are brought back. Pure.

Recreate and Replace take replicas away before the candidate is ready. If it does not get further
within spec.rollout.progressDeadlineSeconds, whatever keeps it, they come back: then it is not run
any more until the policy that it expired under changes (spec.rollout, spec.capacity; not a number
of replicas) or somebody promotes it. Kubernetes' own deadline of a Deployment will not do: it runs
from the beginning of a candidate that waited for room, so that a change from Surge to Recreate
would be taken back at once.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from kvline_operator.gate import GateResult, Verdict
from kvline_operator.revision_state import PROMOTED, RevisionState
from kvline_operator.rollout import RolloutPlan, Situation
from kvline_operator.spec import Rollout


def applied(
    now: Situation, how: Rollout, policy: str, states: dict[str, RevisionState], time: datetime
) -> Situation:
    """With the candidate's verdict expired where its time is over; `policy` is ServiceSpec's."""
    verdict = now.verdict
    if verdict is None:
        return now
    mine = states[now.wanted]
    same_policy = mine.policy in ("", policy)  # earlier operators kept none
    if same_policy and 0 < mine.expired == states[now.stable].accepted:
        if how.promote == now.wanted and mine.verdict != PROMOTED:
            return now  # a promotion is tried once
        return replace(now, verdict=replace(verdict, expired=True, message=mine.overdue))
    if how.paused or not _overdue(verdict, now, how, mine, time):
        return now
    seconds = how.progress_deadline_seconds
    text = f"not ready within spec.rollout.progressDeadlineSeconds ({seconds}): {verdict.message}"
    return replace(now, verdict=replace(verdict, expired=True, message=text))


def _overdue(
    verdict: Verdict, now: Situation, how: Rollout, mine: RevisionState, time: datetime
) -> bool:
    if verdict.result is GateResult.PASSED and now.ready(now.wanted):
        return False  # it serves, and goes on where there is room
    since = _moment(mine.since)
    return since is not None and time - since >= timedelta(seconds=how.progress_deadline_seconds)


def remember(
    states: dict[str, RevisionState],
    plan: RolloutPlan,
    now: Situation,
    policy: str,
    time: datetime,
) -> dict[str, RevisionState]:
    """All states after this reconcile: since when replicas are missing for the candidate without
    one of its own in their place, and which one had its time."""
    out = {
        name: replace(s, since="", expired=0, overdue="", policy="") for name, s in states.items()
    }
    verdict, mine = plan.gate, states[now.wanted]
    if verdict is not None and verdict.expired:
        accepted = states[now.stable].accepted
        out[now.wanted] = replace(
            out[now.wanted], expired=accepted, overdue=verdict.message, policy=policy
        )
    elif plan.candidate and not plan.paused and _is_missing(now, plan):
        since = mine.since if _moment(mine.since) else time.strftime("%Y-%m-%dT%H:%M:%SZ")
        out[now.wanted] = replace(out[now.wanted], since=since)
    return out


def _is_missing(now: Situation, plan: RolloutPlan) -> bool:
    ready = now.ready(now.wanted)
    goes_on = ready > 0 and plan.gate is not None and plan.gate.result is GateResult.PASSED
    return not goes_on and plan.replicas.get(now.stable, 0) < now.replicas - ready


def _moment(text: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)
