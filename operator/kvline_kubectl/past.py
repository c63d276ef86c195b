"""The phases of a service's revisions, from its ControllerRevisions and status."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvline_operator.api.spec import parse
from kvline_operator.errors import SpecError
from kvline_operator.observe.pods import condition_of
from kvline_operator.plan.phase import Policy, phases
from kvline_operator.report.status_cache import RevisionEntry
from kvline_operator.store.verdict import GateResult, Verdict

Object = dict[str, Any]


def with_phases(past: tuple[RevisionEntry, ...], body: Object) -> tuple[RevisionEntry, ...]:
    try:
        policy = Policy.of(parse(body))
    except SpecError:
        policy = Policy()  # such a spec changes nothing
    now = _judged(body.get("status") or {})
    found = phases({item.name: item.state for item in past}, policy, now)
    return tuple(replace(item, phase=found[item.name]) for item in past)


def _judged(status: Object) -> dict[str, Verdict | None]:
    """Today's verdict on the candidate, which only the operator that reads its pods knows."""
    rollout = status.get("rollout") or {}
    candidate, gate = rollout.get("candidateRevision"), rollout.get("gate") or {}
    if not candidate or gate.get("revision") != candidate:
        return {}
    blocked = condition_of(status, "UpToDate").get("reason") in ("GateHeld", "PromotionRefused")
    return {candidate: Verdict(GateResult(gate["result"]), "", blocked=blocked)}
