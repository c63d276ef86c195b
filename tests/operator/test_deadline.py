"""When what was taken away for a candidate comes back: a story with its own clock."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from kvline_operator import deadline, verdicts
from kvline_operator.gate import GateResult, Verdict
from kvline_operator.rollout import RolloutPlan, Situation, Sized, plan
from kvline_operator.spec import OnFailure, Rollout, Strategy
from kvline_operator.verdicts import PROMOTED, Standing

START = datetime(2026, 11, 22, 10, 0, tzinfo=UTC)
HOW = Rollout(strategy=Strategy.RECREATE, progress_deadline_seconds=60)
HELD = Verdict(GateResult.HELD, "b-1 has no node")
PASSED = Verdict(GateResult.PASSED, "enough")
FAILED = Verdict(GateResult.REJECTED, "too little")


class Story:
    """Reconciles one after another, by a clock of the test; annotations are all that is kept."""

    def __init__(self, how: Rollout = HOW, replicas: int = 1) -> None:
        self.how, self.replicas, self.time = how, replicas, START
        self.sized: tuple[Sized, ...] = (Sized("a", replicas, replicas),)
        self.standings = {"a": Standing(accepted=3), "b": Standing()}

    def step(self, verdict: Verdict | None, seconds: int = 1, wanted: str = "b") -> RolloutPlan:
        self.time += timedelta(seconds=seconds)
        now = Situation(wanted, "a", self.replicas, self.sized, verdict)
        now = deadline.applied(now, self.how, self.standings, self.time)
        made = plan(now, self.how)
        after = deadline.remember(self.standings, made, now, self.time)
        self.standings = {name: self.kept(standing) for name, standing in after.items()}
        self.sized = tuple(Sized(r, n, n if r == "a" else 0) for r, n in made.replicas.items())
        return made

    @staticmethod
    def kept(standing: Standing) -> Standing:
        """As the next process finds it."""
        metadata = {"annotations": verdicts.written(standing)}
        return verdicts.read({"metadata": metadata})


def test_what_was_taken_away_comes_back_and_stays() -> None:
    story = Story()
    assert story.step(HELD).replicas == {"b": 1, "a": 0}
    assert story.step(HELD, 59).replicas == {"b": 1, "a": 0}
    back = story.step(HELD, 1)
    assert (back.replicas, back.rejected, back.stable) == ({"a": 1}, "b", "a")
    assert back.gate is not None and "progressDeadlineSeconds (60): b-1 has no node" in (
        back.gate.message
    )
    later = story.step(replace(HELD, message="no replica has been measured yet"), 9999)
    assert later.replicas == {"a": 1} and later.gate == back.gate


def test_another_spec_or_a_promotion_tries_again_and_a_promotion_once() -> None:
    story = Story()
    for seconds in (1, 60):
        story.step(HELD, seconds)
    assert story.step(HELD).rejected == "b"
    story.step(None, wanted="a")  # the old spec, and the new one again
    assert story.step(HELD).candidate == "b"
    assert story.step(HELD, 61).rejected == "b"

    story.how = replace(HOW, promote="b")
    promoted = Verdict(GateResult.PASSED, "promoted by hand", promoted=True)
    assert story.step(promoted).replicas == {"b": 1, "a": 0}
    story.standings["b"] = replace(story.standings["b"], verdict=PROMOTED)
    assert story.step(promoted, 61).replicas == {"a": 1}
    assert story.step(promoted, 1000).replicas == {"a": 1}


def test_hold_is_for_a_while_too_where_nothing_serves() -> None:
    story = Story(replace(HOW, on_failure=OnFailure.HOLD))
    assert story.step(FAILED).replicas == {"b": 1, "a": 0}
    assert story.step(FAILED, 60).replicas == {"a": 1}


def test_what_takes_nothing_away_waits_for_ever() -> None:
    story = Story(replace(HOW, strategy=Strategy.SURGE))
    story.step(HELD)
    assert story.step(HELD, 9999).replicas == {"b": 1, "a": 1}
    # With the change to Recreate its time begins: it only gets room now.
    story.how = HOW
    assert story.step(HELD).replicas == {"b": 1, "a": 0}
    assert story.step(HELD, 59).replicas == {"b": 1, "a": 0}
    assert story.step(HELD, 1).replicas == {"a": 1}


def test_one_that_passed_and_serves_goes_on_as_there_is_room() -> None:
    story = Story(replace(HOW, strategy=Strategy.REPLACE), replicas=3)
    assert story.step(HELD).replicas == {"b": 1, "a": 2}
    story.sized = (Sized("a", 2, 2), Sized("b", 1, 1))
    assert story.step(PASSED, 70).replicas == {"b": 2, "a": 1}
    story.sized = (Sized("a", 1, 1), Sized("b", 2, 1))
    assert story.step(PASSED, 9999).replicas == {"b": 2, "a": 1}
    # Its one ready replica is lost: from then on the time counts.
    story.sized = (Sized("a", 1, 1), Sized("b", 2, 0))
    assert story.step(PASSED, 1).candidate == "b"
    assert story.step(PASSED, 61).replicas == {"a": 3}


def test_a_pause_stops_the_clock() -> None:
    story = Story()
    story.step(HELD)
    story.how = replace(HOW, paused=True)
    assert story.step(HELD, 9999).candidate == "b"
    story.how = HOW
    assert story.step(HELD, 1).candidate == "b"
    assert story.step(HELD, 60).rejected == "b"


def test_a_clock_that_somebody_made_unreadable_begins_anew() -> None:
    story = Story()
    story.step(HELD)
    story.standings["b"] = replace(story.standings["b"], since="yesterday")
    assert story.step(HELD, 9999).candidate == "b"
    assert story.step(HELD, 60).rejected == "b"
