"""How many replicas each revision gets: sequences of a change, and properties of every state."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvline_operator.api.spec import OnFailure, Rollout, Strategy
from kvline_operator.observe.children import DeploymentState as Deployed
from kvline_operator.plan.rollout import RolloutPlan, Situation, plan, write_order
from kvline_operator.store.verdict import GateResult, Verdict

HOW = Rollout()
PASSED, REJECTED = GateResult.PASSED, GateResult.REJECTED
VERDICTS = {result: Verdict(result, "why") for result in GateResult}
counts = st.integers(0, 6)


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    made = []
    for name in draw(st.lists(st.sampled_from("abcd"), unique=True)):
        replicas = draw(counts)
        made.append(Deployed(name, replicas, draw(st.integers(0, replicas))))
    stable = draw(st.sampled_from(["", "a", "b"]))
    verdict = VERDICTS[draw(st.sampled_from(list(GateResult)))] if stable == "b" else None
    return Situation("a", stable, draw(counts), tuple(made), verdict)


def ready_after(now: Situation, made: RolloutPlan) -> int:
    """Ready replicas that are kept, by revision."""
    return sum(min(n, now.ready(r)) for r, n in made.replicas.items())


@given(
    situations(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([(Strategy.SURGE, 0), (Strategy.REPLACE, 1)]),
)
def test_ready_capacity_never_sinks_below_what_is_asked_for(
    now: Situation, hold: bool, paused: bool, how: tuple[Strategy, int]
) -> None:
    """Whatever the gate's result and earlier specs: Surge keeps all wanted replicas ready, Replace
    all but one."""
    strategy, missing = how
    on_failure = OnFailure.HOLD if hold else OnFailure.ROLLBACK
    made = plan(now, replace(HOW, on_failure=on_failure, strategy=strategy, paused=paused))
    have = sum(s.ready for s in now.existing)
    assert ready_after(now, made) >= min(now.replicas - missing, have)
    # A pause takes none of the candidate's replicas away, ready or not.
    most = 3 * now.replicas if paused else 2 * now.replicas + 1
    assert sum(made.replicas.values()) <= most


@given(situations(), st.booleans(), st.booleans())
def test_replace_never_asks_for_more_replicas_than_the_spec_beside_what_drains(
    now: Situation, prepared: bool, paused: bool
) -> None:
    """With no room for one more replica, Replace asks for at most the missing ones beside those
    that drain."""
    now = replace(now, prepared=prepared)
    made = plan(now, replace(HOW, strategy=Strategy.REPLACE, paused=paused))
    wanted = {made.candidate, made.stable}
    assert sum(n for r, n in made.replicas.items() if r in wanted) <= now.replicas
    kept = sum(min(n, now.ready(r)) for r, n in made.replicas.items() if r in wanted)
    drained = sum(n for r, n in made.replicas.items() if r not in wanted)
    assert drained <= max(0, now.replicas - 1 - kept)


class World:
    """Nodes with room for so many replicas; each replica with room gets ready, unless it fails."""

    def __init__(self, room: int, **revisions: int) -> None:
        self.room, self.running = room, dict(revisions)
        self.asked = dict(revisions)
        self.broken: set[str] = set()

    def existing(self) -> tuple[Deployed, ...]:
        return tuple(
            Deployed(r, n, 0 if r in self.broken else min(n, self.running.get(r, 0)))
            for r, n in self.asked.items()
        )

    def apply(self, asked: dict[str, int]) -> None:
        self.asked = asked
        self.running = {r: min(n, self.running.get(r, 0)) for r, n in asked.items()}
        for revision, count in asked.items():
            free = self.room - sum(self.running.values())
            self.running[revision] += max(0, min(free, count - self.running[revision]))

    def ready(self) -> int:
        return sum(s.ready for s in self.existing())


@given(
    st.integers(1, 6),
    st.sampled_from([Strategy.REPLACE, Strategy.RECREATE]),
    st.sampled_from(["passes", "fails", "expires", "is taken back"]),
    st.integers(0, 8),
)
def test_without_room_to_spare_every_change_comes_to_its_end(
    replicas: int, strategy: Strategy, ending: str, when: int
) -> None:
    """With room for exactly the wanted replicas, from any moment of a rollout: no two revisions
    wait for each other's room, and with Replace at most one replica is missing."""
    world, how = World(replicas, a=replicas), replace(HOW, strategy=strategy)
    wanted, verdict = "b", VERDICTS[GateResult.HELD]
    for step in range(40):
        if step == 2 and not verdict.expired:
            verdict = VERDICTS[GateResult.PASSED]
        if step == when and ending == "is taken back":
            wanted = "a"
        if step >= when and ending == "expires":
            verdict = replace(verdict, expired=True)
        if step >= when and ending == "fails":
            world.broken, verdict = {"b"}, VERDICTS[GateResult.REJECTED]
        made = plan(Situation(wanted, "a", replicas, world.existing(), verdict), how)
        world.apply(made.replicas)
        if strategy is Strategy.REPLACE and not world.broken:
            assert world.ready() >= replicas - 1
        if made.stable == "b":
            break
    expected = "b" if made.stable == "b" else "a"
    assert (ending != "passes") or expected == "b"
    assert world.running == {expected: replicas} and world.ready() == replicas


@given(situations())
def test_an_unmeasured_candidate_gets_one_replica_and_a_rejected_one_no_new_ones(
    now: Situation,
) -> None:
    made = plan(now, HOW)
    if now.verdict is None or made.stable == now.wanted:
        return
    if now.verdict.result is GateResult.HELD:
        assert made.replicas[now.wanted] == max(
            min(1, now.replicas), min(now.ready(now.wanted), now.replicas)
        )
    if now.verdict.result is GateResult.REJECTED:
        assert made.rejected == now.wanted and not made.candidate
        assert made.replicas.get(now.wanted, 0) <= now.size(now.wanted)


def story(
    *existing: Deployed, verdict: GateResult, how: Rollout = HOW, replicas: int = 2
) -> RolloutPlan:
    return plan(Situation("b", "a", replicas, existing, VERDICTS[verdict]), how)


def test_the_story_of_a_change_that_passes() -> None:
    assert plan(Situation("a", "", 2, (), None), HOW).replicas == {"a": 2}
    first = story(Deployed("a", 2, 2), verdict=GateResult.HELD)
    assert (first.replicas, first.stable, first.candidate) == ({"b": 1, "a": 2}, "a", "b")
    passed = story(Deployed("a", 2, 2), Deployed("b", 1, 0), verdict=GateResult.PASSED)
    assert passed.replicas == {"b": 1, "a": 2}
    half = story(Deployed("a", 2, 2), Deployed("b", 1, 1), verdict=GateResult.PASSED)
    assert (half.replicas, half.stable) == ({"b": 2, "a": 1}, "a")
    done = story(Deployed("a", 1, 1), Deployed("b", 2, 2), verdict=GateResult.PASSED)
    assert (done.replicas, done.stable, done.candidate) == ({"b": 2}, "b", "")


def test_one_that_fails_goes_and_one_that_fails_late_goes_as_the_others_are_back() -> None:
    early = story(Deployed("a", 2, 2), Deployed("b", 1, 0), verdict=GateResult.REJECTED)
    assert (early.replicas, early.rejected, early.stable) == ({"a": 2}, "b", "a")
    late = story(Deployed("a", 1, 1), Deployed("b", 2, 1), verdict=GateResult.REJECTED)
    assert late.replicas == {"a": 2, "b": 1}
    held = story(
        Deployed("a", 2, 2),
        Deployed("b", 1, 0),
        verdict=GateResult.REJECTED,
        how=replace(HOW, on_failure=OnFailure.HOLD),
    )
    assert (held.replicas, held.candidate, held.rejected) == ({"b": 1, "a": 2}, "b", "")


def test_recreate_takes_the_old_ones_away_first() -> None:
    how = replace(HOW, strategy=Strategy.RECREATE)
    assert story(Deployed("a", 2, 2), verdict=GateResult.HELD, how=how).replicas["a"] == 0
    assert story(Deployed("b", 2, 1), verdict=GateResult.PASSED, how=how).replicas["b"] == 2
    assert story(Deployed("b", 2, 0), verdict=GateResult.REJECTED, how=how).replicas == {"a": 2}


def test_replace_measures_the_candidate_in_the_place_of_one() -> None:
    how = replace(HOW, strategy=Strategy.REPLACE)
    waits = plan(
        Situation("b", "a", 3, (Deployed("a", 3, 3),), VERDICTS[GateResult.HELD], False), how
    )
    assert waits.replicas == {"b": 0, "a": 3}
    first = story(Deployed("a", 3, 3), verdict=GateResult.HELD, how=how, replicas=3)
    assert (first.replicas, first.candidate) == ({"b": 1, "a": 2}, "b")
    passed = story(
        Deployed("a", 2, 2), Deployed("b", 1, 0), verdict=GateResult.PASSED, how=how, replicas=3
    )
    assert passed.replicas == {"b": 1, "a": 2}
    on = story(Deployed("a", 2, 2), Deployed("b", 1, 1), verdict=PASSED, how=how, replicas=3)
    assert on.replicas == {"b": 2, "a": 1}
    back = story(
        Deployed("a", 2, 2), Deployed("b", 1, 0), verdict=GateResult.REJECTED, how=how, replicas=3
    )
    assert (back.replicas, back.rejected) == ({"a": 3}, "b")


def test_room_is_given_back_before_another_asks_for_it() -> None:
    """Between two writes there are never more replicas than wanted; a new Deployment is created
    first, so that its refusal costs nothing."""
    existing = (Deployed("a", 2, 2), Deployed("b", 1, 1), Deployed("c", 1, 1))
    assert [n for n, _ in write_order({"b": 2, "a": 1}, existing)] == ["a", "b"]
    assert [n for n, _ in write_order({"a": 1, "c": 0, "b": 2, "d": 1}, existing)] == list("dacb")


def test_nothing_goes_and_nothing_starts_before_the_candidate_is_prepared() -> None:
    for strategy in Strategy:
        how = replace(HOW, strategy=strategy)
        now = Situation("b", "a", 2, (Deployed("a", 2, 2),), VERDICTS[GateResult.HELD], False)
        assert plan(now, how).replicas == {"b": 0, "a": 2}
        assert plan(Situation("a", "", 2, (), None, False), how).replicas == {"a": 0}


def test_one_that_is_not_ready_by_its_deadline_goes_and_the_others_come_back() -> None:
    how = replace(HOW, strategy=Strategy.RECREATE, on_failure=OnFailure.HOLD)
    for result in GateResult:
        verdict = Verdict(result, "why", expired=True)
        made = plan(Situation("b", "a", 2, (Deployed("b", 2, 0),), verdict), how)
        assert (made.replicas, made.stable, made.rejected) == ({"a": 2}, "a", "b")


def test_after_a_rejection_the_stable_revision_is_the_one_that_is_to_run() -> None:
    """Whose pods are counted, and whose Deployment says why there are none."""
    on_its_way = story(Deployed("a", 2, 2), verdict=GateResult.HELD)
    rejected = story(Deployed("a", 2, 2), Deployed("b", 1, 0), verdict=GateResult.REJECTED)
    assert (on_its_way.newest, rejected.newest) == ("b", "a")


def test_a_spec_that_changed_on_the_way_brings_the_stable_ones_back_first() -> None:
    """b had replaced one of two replicas when c was applied."""
    existing = (Deployed("a", 1, 1), Deployed("b", 2, 1))
    made = plan(Situation("c", "a", 2, existing, VERDICTS[GateResult.HELD]), HOW)
    assert made.replicas == {"c": 1, "a": 2, "b": 1}
    back = plan(Situation("a", "a", 2, existing, None), HOW)
    assert (back.replicas, back.candidate) == ({"a": 2, "b": 1}, "")
    whole = plan(Situation("a", "a", 2, (Deployed("a", 2, 2), Deployed("b", 1, 1)), None), HOW)
    assert whole.replicas == {"a": 2}


def test_a_pause_holds_the_candidate() -> None:
    how = replace(HOW, paused=True)
    made = story(Deployed("a", 1, 1), Deployed("b", 2, 1), verdict=GateResult.PASSED, how=how)
    assert (made.replicas, made.paused) == ({"a": 1, "b": 2}, True)
    further = story(Deployed("a", 1, 1), Deployed("b", 2, 2), verdict=GateResult.PASSED, how=how)
    assert further.replicas == {"a": 1, "b": 2}
    before_it_began = story(Deployed("a", 2, 2), verdict=GateResult.HELD, how=how)
    assert before_it_began.replicas == {"a": 2, "b": 0}


def test_a_pause_lets_what_serves_be_repaired_and_scaled() -> None:
    """Whatever became of the stable Deployment, and whatever is asked for meanwhile."""
    for strategy, beside in ((Strategy.SURGE, 2), (Strategy.REPLACE, 1)):
        how = replace(HOW, paused=True, strategy=strategy)
        held = Deployed("b", 1, 0)
        for left in ((), (Deployed("a", 0, 0),)):
            made = story(*left, held, verdict=GateResult.HELD, how=how)
            assert made.replicas == {"a": beside, "b": 1}, strategy
        for asked in (6, 1, 0):
            made = story(
                Deployed("a", 2, 2), held, verdict=GateResult.HELD, how=how, replicas=asked
            )
            size = min(1, asked)
            stays = asked - size if strategy is Strategy.REPLACE else asked
            assert made.replicas == {"a": stays, "b": size}, (strategy, asked)
    how = replace(HOW, paused=True, strategy=Strategy.RECREATE)
    made = story(Deployed("a", 0, 0), Deployed("b", 2, 0), verdict=GateResult.HELD, how=how)
    assert made.replicas == {"a": 0, "b": 2}


def test_scaled_to_zero_measures_nothing_and_keeps_the_stable_one() -> None:
    made = story(Deployed("a", 0, 0), verdict=GateResult.HELD, replicas=0)
    assert (made.replicas, made.stable, made.candidate) == ({"b": 0, "a": 0}, "a", "b")
