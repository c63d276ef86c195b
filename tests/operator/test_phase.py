"""In which phase a revision is, from what is stored and today's verdict."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvline_kubectl.past import with_phases
from kvline_operator.plan.phase import Policy, phase
from kvline_operator.plan.threshold import Thresholds
from kvline_operator.report import display
from kvline_operator.report.status_cache import RevisionEntry
from kvline_operator.store.revision_state import Expiry, RevisionState
from kvline_operator.store.verdict import GateResult, Phase, StoredVerdict, Verdict

STABLE = RevisionState(accepted=3)
HELD = Verdict(GateResult.HELD, "b-1: loading")
PASSED = Verdict(GateResult.PASSED, "enough", 980, 950, 1000)
SHORT = Verdict(GateResult.REJECTED, "30 short", 920, 950, 1000)
FAILED = Verdict(GateResult.REJECTED, "ended 2 times")
POLICY = Policy(Thresholds(0, 95), "as applied")


def judged(verdict: Verdict, against: int = 3) -> RevisionState:
    return RevisionState(verdict=StoredVerdict.of(verdict, against))


EXPIRED = replace(judged(PASSED), expiry=Expiry(3, "no node", "as applied"))


@pytest.mark.parametrize(
    ("state", "now", "expected"),
    [
        (STABLE, None, Phase.ACCEPTED),
        (RevisionState(), None, Phase.NEW),
        (RevisionState(accepted=2), None, Phase.NEW),  # one that was left is measured again
        (RevisionState(), HELD, Phase.MEASURING),
        (RevisionState(accepted=2), HELD, Phase.MEASURING),
        (RevisionState(), replace(HELD, blocked=True), Phase.HELD),
        (judged(PASSED), None, Phase.PASSED),
        (judged(PASSED), PASSED, Phase.PASSED),
        (judged(PASSED), SHORT, Phase.REJECTED),  # it failed later
        (judged(SHORT), None, Phase.REJECTED),
        (judged(SHORT, against=2), None, Phase.NEW),
        (judged(PASSED, against=2), None, Phase.NEW),
        (judged(SHORT, against=0), None, Phase.NEW),  # the spec asked for another one since
        (EXPIRED, None, Phase.EXPIRED),
        (EXPIRED, replace(PASSED, expired=True), Phase.EXPIRED),
        (EXPIRED, PASSED, Phase.PASSED),  # a promotion gives it another try
    ],
)
def test_what_is_stored_counts_beside_the_stable_revision_that_it_was_made_against(
    state: RevisionState, now: Verdict | None, expected: Phase
) -> None:
    assert phase(state, STABLE, POLICY, now) is expected


def test_another_policy_ends_an_expiry_and_a_rejection_that_it_would_not_make() -> None:
    other = Policy(Thresholds(0, 92), "another")
    assert phase(EXPIRED, STABLE, other) is Phase.PASSED
    assert phase(judged(SHORT), STABLE, other) is Phase.NEW
    assert phase(judged(FAILED), STABLE, other) is Phase.REJECTED
    unknown = replace(EXPIRED, expiry=Expiry(3, "no node"))  # of an operator that kept no policy
    assert phase(unknown, STABLE, other) is Phase.EXPIRED


def test_without_a_stable_revision_nothing_is_accepted() -> None:
    assert phase(RevisionState(), RevisionState(), POLICY) is Phase.NEW


def entry(name: str, state: RevisionState) -> RevisionEntry:
    return RevisionEntry(name, 1, "image", "", {}, state)


@pytest.mark.parametrize(
    ("rollout", "reason", "expected"),
    [
        ({"candidateRevision": "b", "gate": {"revision": "b", "result": "Held"}}, "", "Measuring"),
        (
            {"candidateRevision": "b", "gate": {"revision": "b", "result": "Held"}},
            "GateHeld",
            "Held",
        ),
        ({"rejectedRevision": "b", "gate": {"revision": "b", "result": "Rejected"}}, "", "New"),
        ({}, "", "New"),
    ],
)
def test_the_plugin_shows_the_phase_that_the_operator_acts_by(
    rollout: dict[str, Any], reason: str, expected: str
) -> None:
    conditions = [{"type": "UpToDate", "status": "False", "reason": reason}]
    body = {
        "metadata": {"name": "chat", "namespace": "ns", "uid": "u"},
        "spec": {"model": {"source": "pvc://m/x"}, "resources": {"memory": "2Gi"}},
        "status": {"rollout": rollout, "conditions": conditions},
    }
    states = {"b": RevisionState(), "a": STABLE, "c": judged(SHORT), "d": judged(SHORT, 0)}
    past = tuple(entry(*item) for item in states.items())
    shown = [display.phase(item) for item in with_phases(past, body)]
    assert shown == [expected, "Accepted", "Rejected", ""]
    assert [display.verdict(item) for item in past] == ["", "", "Rejected", "Rejected"]
