"""How many replicas the load asks for: cases, stories over time, and what holds for every load."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvline_contract.report import Load
from kvline_operator.autoscale import VERSION, Activity, Lower, Scale, activity, decide, demand
from kvline_operator.spec import Autoscaling

HOW = Autoscaling(max_replicas=8, target_percent=50, scale_down_delay_seconds=60)
NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)


def load(
    used: int = 0, waiting: int = 0, running: int = 0, queued: int = 0, refused: int = 0
) -> Load:
    return Load(1, 1000, used, 0, waiting, running, queued, refused, 10, False)


def scale(replicas: int) -> Scale:
    return Scale(VERSION, replicas, "before")


@pytest.mark.parametrize(
    ("replies", "replicas"),
    [
        ([load()], 0),
        ([load(used=500)], 1),  # exactly the target
        ([load(used=501)], 2),
        ([load(used=400, waiting=600)], 2),  # prompts that wait count as they will be
        ([load(running=5)], 1),
        ([load(running=4, queued=2)], 2),
        ([load(running=5, refused=20)], 5),  # who was refused would have run
        ([load(used=600), load(used=600)], 3),
        ([load(used=100, running=9), load(running=2)], 3),  # the larger of the two
    ],
)
def test_demand_in_replicas(replies: list[Load], replicas: int) -> None:
    assert demand(replies, HOW.target_percent).replicas == replicas


def test_the_smallest_replica_is_the_unit() -> None:
    small = Load(1, 500, 400, 0, 0, 1, 0, 0, 10, False)
    assert demand([small, load(used=350)], 50).replicas == 3


def test_more_comes_at_once_and_fewer_only_after_the_whole_delay() -> None:
    up = decide(scale(1), 1, demand([load(used=1400)], 50), HOW, NOON)
    assert (up.replicas, up.lower) == (3, None)
    assert "1400 KV tokens used" in up.why and "ask for 3" in up.why

    began = decide(up, 3, demand([load()] * 3, 50), HOW, NOON)
    assert began.replicas == 3
    second = NOON + timedelta(seconds=30)
    peak = decide(began, 3, demand([load(used=600), *[load()] * 2], 50), HOW, second)
    assert peak.lower == Lower("2026-11-22T12:00:00Z", 2)
    almost = decide(peak, 3, demand([load()] * 3, 50), HOW, NOON + timedelta(seconds=59))
    assert almost == peak
    # Down to what the peak of the delay asked for, not to the last reading.
    down = decide(almost, 3, demand([load()] * 3, 50), HOW, NOON + timedelta(seconds=60))
    assert (down.replicas, down.lower) == (2, None)


def test_a_load_that_comes_back_begins_the_delay_anew() -> None:
    began = decide(scale(3), 3, demand([load()] * 3, 50), HOW, NOON)
    assert began.lower is not None
    back = decide(began, 3, demand([load(used=1400), load(), load()], 50), HOW, NOON)
    assert (back.replicas, back.lower) == (3, None)


def test_a_silent_replica_is_not_an_idle_one() -> None:
    late = NOON + timedelta(hours=1)
    waited = Scale(VERSION, 4, "before", Lower("2026-11-22T12:00:00Z", 1))
    held = decide(waited, 4, demand([load(), None], 50), HOW, late)
    assert held == scale(4)
    # What the others say is asked for all the same: the silent one could only add to it.
    assert decide(waited, 4, demand([load(used=2600), None], 50), HOW, late).replicas == 6
    assert decide(waited, 4, demand([None], 50), HOW, late) == scale(4)
    assert decide(waited, 4, demand([], 50), HOW, late) == scale(4)


def test_bounds_hold_for_what_is_remembered_too() -> None:
    assert decide(scale(20), 0, demand([None], 50), HOW, NOON).replicas == 8
    narrow = Autoscaling(max_replicas=8, min_replicas=2)
    assert decide(None, 0, demand([], 50), narrow, NOON).replicas == 2
    assert decide(None, 5, demand([], 50), narrow, NOON).replicas == 5  # a service that serves


@pytest.mark.parametrize(
    ("asked", "kept", "ready", "reason"),
    [
        ([load()], 1, 1, Activity.STABLE),
        ([load()], 2, 1, Activity.SCALING),
        ([load(running=50)], 8, 1, Activity.AT_MAXIMUM),
        ([load(), None], 2, 2, Activity.UNKNOWN),
        ([], 1, 0, Activity.UNKNOWN),
    ],
)
def test_what_is_said(asked: list[Load | None], kept: int, ready: int, reason: Activity) -> None:
    said, text = activity(scale(kept), demand(asked, 50), HOW, ready)
    assert said is reason
    assert "spec.replicas is not used" in text


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "[]",
        '{"version":2,"replicas":1,"why":""}',
        '{"version":1,"replicas":0,"why":""}',
        '{"version":1,"replicas":3,"why":"","lower":{"since":"noon","most":1}}',
        '{"version":1,"replicas":3,"why":"","lower":{"since":"2026-11-22T12:00:00","most":1}}',
    ],
)
def test_an_unreadable_memory_counts_as_none(text: str | None) -> None:
    assert Scale.parse(text) is None


loads = st.builds(
    load, *[st.integers(0, 5000)] * 2, *[st.integers(0, 50)] * 3
)  # used, waiting, running, queued, refused


@given(st.lists(st.none() | loads, max_size=5), st.integers(1, 8), st.integers(0, 200))
def test_replicas_stay_in_bounds_and_never_sink_before_the_delay(
    replies: list[Load | None], replicas: int, seconds: int
) -> None:
    before = Scale(VERSION, replicas, "", Lower("2026-11-22T12:00:00Z", 1))
    asked = demand(replies, HOW.target_percent)
    after = decide(before, replicas, asked, HOW, NOON + timedelta(seconds=seconds))
    assert HOW.min_replicas <= after.replicas <= HOW.max_replicas
    if after.replicas < replicas:
        assert seconds >= HOW.scale_down_delay_seconds and None not in replies and replies
        assert after.replicas >= min(asked.replicas, HOW.max_replicas)
    assert after.replicas >= min(asked.replicas, HOW.max_replicas)
    assert Scale.parse(after.dumps()) == after
