"""What a reconcile keeps of a revision: verdicts, acceptances and baselines."""

from __future__ import annotations

from dataclasses import replace

from kvline_operator.observe.pods import Measured
from kvline_operator.plan import acceptance
from kvline_operator.plan.acceptance import accept_first, updated
from kvline_operator.plan.phase import current_verdict
from kvline_operator.plan.rollout import RolloutPlan
from kvline_operator.plan.threshold import Thresholds
from kvline_operator.store.revision_state import RevisionState, stable
from kvline_operator.store.verdict import GateResult, StoredVerdict, Verdict

A = RevisionState(accepted=3, baseline={"H200": 1000}, bytes_per_token=100)
PASS = Verdict(GateResult.PASSED, "enough", 980, 950, 1000)
FAIL = Verdict(GateResult.REJECTED, "30 short", 920, 950, 1000)
PROMOTED = Verdict(GateResult.PASSED, "by hand", 980, promoted=True)
POLICY = Thresholds(0, 95)


def judged(verdict: Verdict, against: int = 3, accepted: int = 0) -> RevisionState:
    return RevisionState(accepted=accepted, verdict=StoredVerdict.of(verdict, against))


def plan(gate: Verdict | None, stable: str = "a", rejected: str = "") -> RolloutPlan:
    return RolloutPlan({"a": 1}, stable, gate=gate, rejected=rejected)


def test_a_verdict_counts_beside_the_revision_it_was_given_beside() -> None:
    after = updated({"a": A, "b": RevisionState()}, plan(FAIL, rejected="b"), "b", ())
    assert after["b"] == judged(FAIL) and after["b"].measured == 920
    assert current_verdict(after["b"], after["a"], POLICY) == FAIL
    assert current_verdict(after["b"], replace(A, accepted=4), POLICY) is None


def test_a_shortfall_counts_by_the_policy_of_today() -> None:
    """A lower minCapacityPercent or minKVTokens lifts a rejection for a shortfall, not one for a
    failed engine."""
    short = judged(FAIL)
    assert current_verdict(short, A, POLICY) is not None
    assert current_verdict(short, A, Thresholds(0, 92)) is None
    assert current_verdict(short, A, Thresholds(930, 92)) is not None
    ended = judged(Verdict(GateResult.REJECTED, "ended 2 times"))
    assert current_verdict(ended, A, Thresholds(0, 1)) is not None


def test_a_promotion_of_what_serves_begins_a_new_baseline_once() -> None:
    """Promoting the stable revision, which measures less now, lowers the baseline."""
    less = (Measured("H200", 400, 100), Measured("H200", 500, 100))
    once = updated({"a": A}, plan(None), "a", less, promote="a")
    assert once["a"].baseline == {"H200": 400} and acceptance.is_promoted(once["a"])
    again = updated(once, plan(None), "a", (Measured("H200", 300, 100),), promote="a")
    assert again == once, "the annotation is spent until it is taken away"
    taken_away = updated(again, plan(None), "a", less)
    assert taken_away["a"].verdict is not None and not acceptance.is_promoted(taken_away["a"])
    anew = updated(taken_away, plan(None), "a", (Measured("H200", 300, 100),), promote="a")
    assert anew["a"].baseline == {"H200": 300}
    assert updated({"a": A}, plan(None), "a", (), promote="a") == {"a": A}, "nothing serves"


def test_a_rejection_is_dropped_once_the_spec_says_something_else() -> None:
    failed = judged(FAIL)
    assert current_verdict(failed, A, POLICY) is not None
    after = updated({"a": A, "b": failed}, plan(None), "a", ())["b"]
    assert current_verdict(after, A, POLICY) is None
    assert after == judged(FAIL, against=0)


def test_an_acceptance_keeps_the_best_and_a_promotion_begins_anew() -> None:
    serving = (Measured("H200", 980, 100), Measured("H200", 990, 100))
    after = updated({"a": A, "b": RevisionState()}, plan(PASS, "b"), "b", serving)
    assert stable(after) == "b"
    assert (after["b"].accepted, after["b"].baseline, after["b"].required) == (
        4,
        {"H200": 1000},
        950,
    )
    anew = updated({"a": A, "b": RevisionState()}, plan(PROMOTED, "b"), "b", serving)
    assert anew["b"].baseline == {"H200": 980} and acceptance.is_promoted(anew["b"])


def test_the_baseline_is_the_best_of_the_smallest_and_never_sinks() -> None:
    up = updated(
        {"a": A}, plan(None), "a", (Measured("H200", 1200, 100), Measured("H200", 1100, 100))
    )
    assert up["a"].baseline == {"H200": 1100}
    down = updated(up, plan(None), "a", (Measured("H200", 900, 100),))
    assert down["a"].baseline == {"H200": 1100}
    other = updated(up, plan(None), "a", (Measured("A100", 500, 100),))
    assert other["a"].baseline == {"H200": 1100, "A100": 500}


def test_what_serves_first_is_the_beginning() -> None:
    measured = {"a": (Measured("", 400, 100), Measured("", 500, 100)), "b": (Measured("", 9, 100),)}
    assert accept_first({"a": A}, measured, "b") == {"a": A}
    begun = accept_first({"a": RevisionState(), "b": RevisionState()}, measured, "c")
    assert stable(begun) == "a" and begun["a"].baseline == {"": 400}
    assert stable(accept_first({"a": RevisionState(), "b": RevisionState()}, measured, "b")) == "b"
    assert stable(accept_first({"a": RevisionState()}, {}, "a")) == ""
    assert accept_first({"a": RevisionState()}, {"gone": (Measured("", 9, 100),)}, "a") == {
        "a": RevisionState()
    }


def test_a_promotion_is_spent_once_something_else_was_accepted() -> None:
    b = judged(PROMOTED, accepted=4)
    assert acceptance.promoted(RevisionState(), A, asked=True)
    assert acceptance.promoted(b, A, asked=True), "while it takes over"
    c = replace(A, accepted=5)
    assert not acceptance.promoted(b, c, asked=True)
    kept = updated({"b": b, "c": c}, plan(None, "c"), "c", (), promote="b")["b"]
    assert acceptance.is_promoted(kept)
    taken_away = updated({"b": b, "c": c}, plan(None, "c"), "c", ())["b"]
    assert acceptance.promoted(taken_away, c, asked=True)
