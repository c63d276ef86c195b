"""How many replicas each revision gets: a property over every mix of old and new."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvline_operator.rollout import Sized, plan

counts = st.integers(0, 6)


@st.composite
def deployments(draw: st.DrawFn) -> list[Sized]:
    out = []
    for name in draw(st.lists(st.sampled_from("abcd"), unique=True)):
        replicas = draw(counts)
        out.append(Sized(name, replicas, draw(st.integers(0, replicas))))
    return out


@given(counts, deployments())
def test_capacity_never_sinks_below_what_is_wanted_and_the_end_is_the_new_one(
    replicas: int, existing: list[Sized]
) -> None:
    made = plan("a", replicas, existing)
    assert made.replicas["a"] == replicas
    ready = {s.revision: s.ready for s in existing}
    kept = sum(min(n, ready.get(r, 0)) for r, n in made.replicas.items() if r != "a")
    have = sum(ready.values())
    assert min(ready.get("a", 0), replicas) + kept >= min(replicas, have)
    assert all(
        n <= next(s.replicas for s in existing if s.revision == r)
        for r, n in made.replicas.items()
        if r != "a"
    )
    if not made.candidate:
        assert made.replicas == {"a": replicas}
        assert made.stable == "a"


def test_the_story_of_a_change() -> None:
    assert plan("a", 2, []).replicas == {"a": 2}
    started = plan("b", 2, [Sized("a", 2, 2), Sized("b", 2, 0)])
    assert (started.replicas, started.stable, started.candidate) == ({"b": 2, "a": 2}, "a", "b")
    half = plan("b", 2, [Sized("a", 2, 2), Sized("b", 2, 1)])
    assert (half.replicas, half.stable) == ({"b": 2, "a": 1}, "b")
    done = plan("b", 2, [Sized("a", 1, 1), Sized("b", 2, 2)])
    assert (done.replicas, done.candidate) == ({"b": 2}, "")


def test_an_old_revision_that_does_not_serve_is_not_kept() -> None:
    assert plan("b", 1, [Sized("a", 1, 0)]).replicas == {"b": 1}


def test_scaled_to_zero_leaves_nothing() -> None:
    assert plan("b", 0, [Sized("a", 3, 3)]).replicas == {"b": 0}
