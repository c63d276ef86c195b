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
    assert again == once, "the field is spent until it is taken away"
    taken_away = updated(again, plan(None), "a", less)
    assert taken_away["a"] == replace(once["a"], promotion_used=False)
    anew = updated(taken_away, plan(None), "a", (Measured("H200", 300, 100),), promote="a")
    assert anew["a"].baseline == {"H200": 300}
    assert updated({"a": A}, plan(None), "a", (), promote="a") == {"a": A}, "nothing serves"
    some = updated({"a": A}, plan(None), "a", less, promote="a", read=False)
    assert some == {"a": A}, "another replica, which may have less, has yet to be read"


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


def test_a_promotion_does_not_outlive_a_rollback() -> None:
    """Neither its verdict nor the field that still names it, whatever its gate says then."""
    promoted = updated({"a": A, "b": RevisionState()}, plan(PROMOTED), "b", (), promote="b")["b"]
    assert promoted == replace(judged(PROMOTED), promotion_used=True)
    assert current_verdict(promoted, A, POLICY) == PROMOTED, "while it takes over"
    back = updated({"a": A, "b": promoted}, plan(None), "a", (), promote="b")["b"]
    assert current_verdict(back, A, POLICY) is None
    again = updated({"a": A, "b": back}, plan(FAIL, rejected="b"), "b", (), promote="b")["b"]
    for state in (promoted, back, again):
        assert "has accepted it once" in acceptance.promotion_refused(state, measured=True)
    removed = updated({"a": A, "b": again}, plan(None), "a", ())["b"]
    assert not acceptance.promotion_refused(removed, measured=False)


def test_a_rollback_ends_a_promotion_whose_field_was_removed() -> None:
    back = updated({"a": A, "b": judged(PROMOTED)}, plan(None), "a", ())["b"]
    assert current_verdict(back, A, POLICY) is None


def test_only_what_was_measured_is_promoted() -> None:
    """At any time: what was held as not comparable, and has no pods now, was."""
    assert "ever measured" in acceptance.promotion_refused(RevisionState(), measured=False)
    assert not acceptance.promotion_refused(RevisionState(), measured=True)
    held = Verdict(GateResult.HELD, "cannot be compared", 700, blocked=True)
    after = updated({"a": A, "b": RevisionState()}, plan(held), "b", ())["b"]
    waits = updated({"a": A, "b": after}, plan(replace(held, measured=0)), "b", ())["b"]
    assert not acceptance.promotion_refused(waits, measured=False)
    ended = judged(Verdict(GateResult.REJECTED, "ended 2 times"))
    assert "ever measured" in acceptance.promotion_refused(ended, measured=False)
    assert not acceptance.promotion_refused(judged(FAIL), measured=False)
