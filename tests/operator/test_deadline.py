"""When replicas that were removed for a candidate are brought back, with a fake clock."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from kvline_operator.api.spec import OnFailure, Rollout, Strategy
from kvline_operator.observe.children import DeploymentState
from kvline_operator.plan import deadline
from kvline_operator.plan.phase import Policy
from kvline_operator.plan.rollout import RolloutPlan, Situation, plan
from kvline_operator.store import revision_state
from kvline_operator.store.revision_state import Expiry, RevisionState
from kvline_operator.store.verdict import GateResult, StoredVerdict, Verdict

START = datetime(2026, 11, 22, 10, 0, tzinfo=UTC)
HOW = Rollout(strategy=Strategy.RECREATE, progress_deadline_seconds=60)
HELD = Verdict(GateResult.HELD, "b-1 has no node")
PASSED = Verdict(GateResult.PASSED, "enough")
FAILED = Verdict(GateResult.REJECTED, "too little")


class Reconciles:
    """Reconciles in sequence with a fake clock; only annotations are kept between them."""

    def __init__(self, how: Rollout = HOW, replicas: int = 1) -> None:
        self.how, self.replicas, self.time = how, replicas, START
        self.policy = Policy(digest="as applied")
        self.sized: tuple[DeploymentState, ...] = (DeploymentState("a", replicas, replicas),)
        self.states = {"a": RevisionState(accepted=3), "b": RevisionState()}

    def step(self, verdict: Verdict | None, seconds: int = 1, wanted: str = "b") -> RolloutPlan:
        self.time += timedelta(seconds=seconds)
        now = Situation(wanted, "a", self.replicas, self.sized, verdict)
        now = deadline.with_deadline(now, self.how, self.policy, self.states, self.time)
        made = plan(now, self.how)
        after = deadline.updated(self.states, made, now, self.policy, self.time)
        self.states = {name: self.kept(state) for name, state in after.items()}
        self.sized = tuple(
            DeploymentState(r, n, n if r == "a" else 0) for r, n in made.replicas.items()
        )
        return made

    @staticmethod
    def kept(state: RevisionState) -> RevisionState:
        """The state as a restarted operator reads it."""
        metadata = {"annotations": revision_state.to_annotations(state)}
        return revision_state.read({"metadata": metadata})


def test_what_was_taken_away_comes_back_and_stays() -> None:
    service = Reconciles()
    assert service.step(HELD).replicas == {"b": 1, "a": 0}
    assert service.step(HELD, 59).replicas == {"b": 1, "a": 0}
    back = service.step(HELD, 1)
    assert (back.replicas, back.rejected, back.stable) == ({"a": 1}, "b", "a")
    assert back.gate is not None and "progressDeadlineSeconds (60): b-1 has no node" in (
        back.gate.message
    )
    later = service.step(replace(HELD, message="no replica has been measured yet"), 9999)
    assert later.replicas == {"a": 1} and later.gate == back.gate


def test_another_spec_or_a_promotion_tries_again_and_a_promotion_once() -> None:
    service = Reconciles()
    for seconds in (1, 60):
        service.step(HELD, seconds)
    assert service.step(HELD).rejected == "b"
    service.step(None, wanted="a")  # the old spec, and the new one again
    assert service.step(HELD).candidate == "b"
    assert service.step(HELD, 61).rejected == "b"

    service.how = replace(HOW, promote="b")
    promoted = Verdict(GateResult.PASSED, "promoted by hand", promoted=True)
    assert service.step(promoted).replicas == {"b": 1, "a": 0}
    stored = StoredVerdict.of(promoted, 3)
    service.states["b"] = replace(service.states["b"], verdict=stored, promotion_used=True)
    assert service.step(promoted, 61).replicas == {"a": 1}
    assert service.step(promoted, 1000).replicas == {"a": 1}


def test_another_policy_tries_it_again_under_its_own_deadline() -> None:
    service = Reconciles()
    for seconds in (1, 60):
        service.step(HELD, seconds)
    service.replicas = 3
    assert service.step(HELD).replicas == {"a": 3}, "another number of replicas is no policy"
    service.policy = Policy(digest="another")
    assert service.step(HELD).replicas == {"b": 3, "a": 0}
    assert service.step(HELD, 59).candidate == "b"
    assert service.step(HELD, 1).rejected == "b"
    assert service.step(HELD, 9999).rejected == "b"


def test_one_that_an_earlier_operator_brought_back_stays_so_until_the_policy_changes() -> None:
    """It kept no policy, and the operator's upgrade alone takes nothing away."""
    service = Reconciles()
    service.states["b"] = RevisionState(expiry=Expiry(3, "b-1 has no node"))
    assert service.step(HELD).replicas == {"a": 1}
    service.policy = Policy(digest="another")
    assert service.step(HELD).replicas == {"b": 1, "a": 0}


def test_hold_is_for_a_while_too_where_nothing_serves() -> None:
    service = Reconciles(replace(HOW, on_failure=OnFailure.HOLD))
    assert service.step(FAILED).replicas == {"b": 1, "a": 0}
    assert service.step(FAILED, 60).replicas == {"a": 1}


def test_what_takes_nothing_away_waits_for_ever() -> None:
    service = Reconciles(replace(HOW, strategy=Strategy.SURGE))
    service.step(HELD)
    assert service.step(HELD, 9999).replicas == {"b": 1, "a": 1}
    # The deadline starts with the change to Recreate: only then it gets room.
    service.how = HOW
    assert service.step(HELD).replicas == {"b": 1, "a": 0}
    assert service.step(HELD, 59).replicas == {"b": 1, "a": 0}
    assert service.step(HELD, 1).replicas == {"a": 1}


def test_one_that_passed_and_serves_goes_on_as_there_is_room() -> None:
    service = Reconciles(replace(HOW, strategy=Strategy.REPLACE), replicas=3)
    assert service.step(HELD).replicas == {"b": 1, "a": 2}
    service.sized = (DeploymentState("a", 2, 2), DeploymentState("b", 1, 1))
    assert service.step(PASSED, 70).replicas == {"b": 2, "a": 1}
    service.sized = (DeploymentState("a", 1, 1), DeploymentState("b", 2, 1))
    assert service.step(PASSED, 9999).replicas == {"b": 2, "a": 1}
    # Its only ready replica is lost: the deadline starts then.
    service.sized = (DeploymentState("a", 1, 1), DeploymentState("b", 2, 0))
    assert service.step(PASSED, 1).candidate == "b"
    assert service.step(PASSED, 61).replicas == {"a": 3}


def test_a_pause_stops_the_clock() -> None:
    service = Reconciles()
    service.step(HELD)
    service.how = replace(HOW, paused=True)
    assert service.step(HELD, 9999).candidate == "b"
    service.how = HOW
    assert service.step(HELD, 1).candidate == "b"
    assert service.step(HELD, 60).rejected == "b"


def test_a_clock_that_somebody_made_unreadable_begins_anew() -> None:
    service = Reconciles()
    service.step(HELD)
    service.states["b"] = replace(service.states["b"], missing_since="yesterday")
    assert service.step(HELD, 9999).candidate == "b"
    assert service.step(HELD, 60).rejected == "b"
