"""How many replicas each revision gets: stories of a change, and a property over every mix."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvline_operator.gate import Outcome, Verdict
from kvline_operator.rollout import RolloutPlan, Situation, Sized, plan
from kvline_operator.spec import OnFailure, Rollout, Strategy

HOW = Rollout()
VERDICTS = {outcome: Verdict(outcome, "why") for outcome in Outcome}
counts = st.integers(0, 6)


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    made = []
    for name in draw(st.lists(st.sampled_from("abcd"), unique=True)):
        replicas = draw(counts)
        made.append(Sized(name, replicas, draw(st.integers(0, replicas))))
    stable = draw(st.sampled_from(["", "a", "b"]))
    verdict = VERDICTS[draw(st.sampled_from(list(Outcome)))] if stable == "b" else None
    return Situation("a", stable, draw(counts), tuple(made), verdict)


def ready_after(now: Situation, made: RolloutPlan) -> int:
    """Replicas that are ready and stay, revision by revision."""
    return sum(min(n, now.ready(r)) for r, n in made.replicas.items())


@given(situations(), st.booleans())
def test_ready_capacity_never_sinks_below_what_is_asked_for(now: Situation, hold: bool) -> None:
    """Surge, whatever the verdict and whatever is left of earlier specs."""
    how = replace(HOW, on_failure=OnFailure.HOLD if hold else OnFailure.ROLLBACK)
    made = plan(now, how)
    have = sum(s.ready for s in now.existing)
    assert ready_after(now, made) >= min(now.replicas, have)
    assert sum(made.replicas.values()) <= 2 * now.replicas + 1


@given(situations())
def test_an_unmeasured_candidate_gets_one_replica_and_a_rejected_one_no_new_ones(
    now: Situation,
) -> None:
    made = plan(now, HOW)
    if now.verdict is None or made.stable == now.wanted:
        return
    if now.verdict.outcome is Outcome.HOLD:
        assert made.replicas[now.wanted] == max(
            min(1, now.replicas), min(now.ready(now.wanted), now.replicas)
        )
    if now.verdict.outcome is Outcome.FAIL:
        assert made.rejected == now.wanted and not made.candidate
        assert made.replicas.get(now.wanted, 0) <= now.size(now.wanted)


def story(*existing: Sized, verdict: Outcome, how: Rollout = HOW, replicas: int = 2) -> RolloutPlan:
    return plan(Situation("b", "a", replicas, existing, VERDICTS[verdict]), how)


def test_the_story_of_a_change_that_passes() -> None:
    assert plan(Situation("a", "", 2, (), None), HOW).replicas == {"a": 2}
    first = story(Sized("a", 2, 2), verdict=Outcome.HOLD)
    assert (first.replicas, first.stable, first.candidate) == ({"b": 1, "a": 2}, "a", "b")
    passed = story(Sized("a", 2, 2), Sized("b", 1, 0), verdict=Outcome.PASS)
    assert passed.replicas == {"b": 1, "a": 2}
    half = story(Sized("a", 2, 2), Sized("b", 1, 1), verdict=Outcome.PASS)
    assert (half.replicas, half.stable) == ({"b": 2, "a": 1}, "a")
    done = story(Sized("a", 1, 1), Sized("b", 2, 2), verdict=Outcome.PASS)
    assert (done.replicas, done.stable, done.candidate) == ({"b": 2}, "b", "")


def test_one_that_fails_goes_and_one_that_fails_late_goes_as_the_others_are_back() -> None:
    early = story(Sized("a", 2, 2), Sized("b", 1, 0), verdict=Outcome.FAIL)
    assert (early.replicas, early.rejected, early.stable) == ({"a": 2}, "b", "a")
    late = story(Sized("a", 1, 1), Sized("b", 2, 1), verdict=Outcome.FAIL)
    assert late.replicas == {"a": 2, "b": 1}
    held = story(
        Sized("a", 2, 2),
        Sized("b", 1, 0),
        verdict=Outcome.FAIL,
        how=replace(HOW, on_failure=OnFailure.HOLD),
    )
    assert (held.replicas, held.candidate, held.rejected) == ({"b": 1, "a": 2}, "b", "")


def test_recreate_takes_the_old_ones_away_first() -> None:
    how = replace(HOW, strategy=Strategy.RECREATE)
    assert story(Sized("a", 2, 2), verdict=Outcome.HOLD, how=how).replicas["a"] == 0
    assert story(Sized("b", 2, 1), verdict=Outcome.PASS, how=how).replicas["b"] == 2
    assert story(Sized("b", 2, 0), verdict=Outcome.FAIL, how=how).replicas == {"a": 2}


def test_a_spec_that_changed_on_the_way_brings_the_stable_ones_back_first() -> None:
    """b had taken over one of two when c was applied."""
    existing = (Sized("a", 1, 1), Sized("b", 2, 1))
    made = plan(Situation("c", "a", 2, existing, VERDICTS[Outcome.HOLD]), HOW)
    assert made.replicas == {"c": 1, "a": 2, "b": 1}
    back = plan(Situation("a", "a", 2, existing, None), HOW)
    assert (back.replicas, back.candidate) == ({"a": 2, "b": 1}, "")
    whole = plan(Situation("a", "a", 2, (Sized("a", 2, 2), Sized("b", 1, 1)), None), HOW)
    assert whole.replicas == {"a": 2}


def test_a_pause_moves_nothing() -> None:
    how = replace(HOW, paused=True)
    made = story(Sized("a", 1, 1), Sized("b", 2, 1), verdict=Outcome.PASS, how=how)
    assert (made.replicas, made.paused) == ({"a": 1, "b": 2}, True)


def test_scaled_to_zero_measures_nothing_and_keeps_the_stable_one() -> None:
    made = story(Sized("a", 0, 0), verdict=Outcome.HOLD, replicas=0)
    assert (made.replicas, made.stable, made.candidate) == ({"b": 0, "a": 0}, "a", "b")
