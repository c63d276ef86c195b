"""How many replicas the load needs: cases, sequences over time, and properties of every load."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from arrivals import Fleet, Traffic
from hypothesis import given
from hypothesis import strategies as st

from kvline_contract.load import Load
from kvline_operator.api.spec import Autoscaling
from kvline_operator.plan.autoscale import (
    VERSION,
    Activity,
    Scale,
    ScaleDownWindow,
    ScaleUp,
    ScaleUpWindow,
    activity,
    decide,
    demand,
)

HOW = Autoscaling(
    max_replicas=8, target_percent=50, scale_down_delay_seconds=60, scale_up_percent=1000
)
NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)


def load(
    used: int = 0,
    waiting: int = 0,
    running: int = 0,
    queued: int = 0,
    retrying: int = 0,
    arriving: int | None = None,
) -> Load:
    rejected = 60 * retrying  # each once a second
    milli = None if arriving is None else 1000 * arriving
    return Load(1, 1000, used, 0, waiting, running, queued, rejected, 10, False, retrying, milli)


def scale(replicas: int) -> Scale:
    return Scale(VERSION, replicas, "before")


@pytest.mark.parametrize(
    ("replies", "replicas"),
    [
        ([load()], 0),
        ([load(used=500)], 1),  # exactly the target
        ([load(used=501)], 2),
        ([load(used=400, waiting=600)], 2),  # tokens of waiting prompts
        ([load(running=5)], 1),
        ([load(running=4, queued=2)], 2),
        ([load(running=5, retrying=20)], 5),  # rejected clients that retry would run
        ([load(used=500, running=5, retrying=5)], 2),  # and take as many tokens as running ones
        ([load(used=600), load(used=600)], 3),
        ([load(used=100, running=9), load(running=2)], 3),  # the larger of the two
    ],
)
def test_demand_in_replicas(replies: list[Load], replicas: int) -> None:
    assert demand(replies, HOW.target_percent).replicas == replicas


@pytest.mark.parametrize(
    ("replies", "replicas"),
    [
        ([load(running=10, queued=40, retrying=200)], 50),  # no request has finished yet: all count
        ([load(running=10, queued=40, retrying=200, arriving=30)], 6),
        ([load(running=10, queued=40, arriving=-5)], 0),  # a shrinking queue
        ([load(running=5, arriving=50)], 1),  # never more than there are
        (
            [load(running=10, arriving=15), load(running=10, arriving=-5)],
            2,
        ),  # the queue moved to another replica
        ([load(used=900, waiting=300, running=6, queued=6, arriving=6)], 2),  # 600 of the tokens
    ],
)
def test_replicas_are_added_for_what_arrives(replies: list[Load], replicas: int) -> None:
    """The arriving load is what runs and the growth of the queue, not its length."""
    assert demand(replies, HOW.target_percent).arriving == replicas


def test_rejections_of_an_older_server_count_for_nothing() -> None:
    """An older server counts every 4xx as rejected, so its count adds no replicas."""
    old = Load(1, 1000, 100, 0, 0, 4, 0, 12000, 10, False)
    demanded = demand([old], HOW.target_percent)
    assert (demanded.replicas, demanded.arriving) == (1, 1)


def test_a_full_replica_and_200_retrying_clients_ask_for_a_step() -> None:
    """A client that is rejected once a second counts once: never as 12,000 requests a minute."""
    how = Autoscaling(max_replicas=100)
    storm = load(used=900, running=10, queued=40, retrying=200, arriving=10)
    first = decide(scale(1), 1, demand([storm], 70), how, NOON)
    assert first.replicas == 2
    assert decide(first, 2, demand([storm], 70), how, NOON + timedelta(seconds=45)) == first


def test_replicas_rise_by_at_most_the_percentage_within_any_minute() -> None:
    how = Autoscaling(max_replicas=100, scale_up_percent=50)
    much = demand([load(running=10, queued=1000)], 70)
    seen, now = [scale(4)], 0
    while now <= 180:
        seen.append(decide(seen[-1], 4, much, how, NOON + timedelta(seconds=now)))
        now += 15
    counts = [s.replicas for s in seen]
    assert counts[1] == 6 and max(counts) == counts[-1]
    assert all(
        late <= max(early + 1, early * 1.5) for early, late in zip(counts, counts[4:], strict=False)
    )
    assert Scale.parse(seen[-1].dumps()) == seen[-1]
    one = Autoscaling(max_replicas=100, scale_up_percent=1)
    assert decide(scale(1), 1, much, one, NOON).replicas == 2  # one more is always allowed


def test_a_clock_that_was_put_back_stops_no_rise() -> None:
    ahead = Scale(VERSION, 2, "", None, (ScaleUp("2026-11-22T13:00:00Z", 1),))
    how = Autoscaling(max_replicas=100)
    assert decide(ahead, 2, demand([load(running=100)], 70), how, NOON).replicas == 4


TRAFFIC = {
    "clients that retry each second": Traffic(4, 5),
    "clients that retry twice": Traffic(4, 5, retries=2),
    "clients that never retry": Traffic(4, 5, retries=0),
    "clients that retry sooner than Retry-After": Traffic(4, 5, retry_after=0.25, until=600),
    "long answers": Traffic(0.5, 40),
    "short answers": Traffic(20, 1, until=600),
}


@pytest.mark.parametrize("name", TRAFFIC)
def test_replicas_reach_what_the_load_needs_and_no_more_than_a_step_beyond(name: str) -> None:
    """Poisson arrivals, exponential service times, replicas that start in 45 s. The load needs 15
    replicas; one more step of the default 100 % would be 30."""
    traffic = TRAFFIC[name]
    how = Autoscaling(max_replicas=1000, scale_down_delay_seconds=120)
    fleet = Fleet(traffic, how)
    counts = dict(fleet.run(traffic.until + 420))
    needed = traffic.needed(fleet.places, how)
    shown = f"{needed} needed: {list(counts.values())[3::4]} at each minute"
    assert needed == 15
    assert all(n <= 2 ** (1 + now // 60) for now, n in counts.items()), shown
    steady = [n for now, n in counts.items() if 480 < now <= traffic.until]
    capacity = traffic.rate * traffic.service / fleet.places
    assert min(steady) > capacity, shown  # enough to serve all that comes
    assert max(steady) >= needed - 1, shown  # of 14.3: an estimate just below asks for 14
    assert max(counts.values()) <= 2 * needed, shown
    assert fleet.served + fleet.lost == fleet.arrived, shown
    assert list(counts.values())[-1] <= 2, shown  # and gone again


@pytest.mark.parametrize(("start", "seed"), [(45, 1), (45, 2), (300, 1), (600, 3)])
def test_a_storm_of_retries_does_not_overshoot_while_replicas_start(start: int, seed: int) -> None:
    """Of many estimates one is far too high, and each replica that gets ready takes the clients
    that move over to it for new ones. The load needs 15."""
    policy = Autoscaling(max_replicas=1000)
    fleet = Fleet(Traffic(4, 5, until=1200), policy, start=float(start), seed=seed)
    counts = dict(fleet.run(1200))
    shown = f"{list(counts.values())[3::4]} at each minute"
    assert 10 < max(counts.values()) <= 30, shown


def test_while_replicas_start_the_smallest_demand_of_a_minute_counts() -> None:
    policy = Autoscaling(max_replicas=100)

    def at(seconds: int, last: Scale, asked: int, settled: int = 1) -> Scale:
        asks = demand([load(running=7 * asked)], 70)
        return decide(last, 1, asks, policy, NOON + timedelta(seconds=seconds), settled)

    starting = at(15, at(0, scale(4), 9), 6)
    assert (starting.replicas, starting.higher) == (4, ScaleUpWindow("2026-11-22T12:00:00Z", 6))
    assert Scale.parse(starting.dumps()) == starting
    assert at(59, starting, 9).replicas == 4
    more = at(60, starting, 9)
    assert (more.replicas, more.higher) == (6, None)
    assert at(30, starting, 3).higher is None, "the minute starts again"
    assert at(15, starting, 9, settled=4).replicas == 8, "all have been ready for a minute"


def test_the_smallest_replica_is_the_unit() -> None:
    small = Load(1, 500, 400, 0, 0, 1, 0, 0, 10, False)
    assert demand([small, load(used=350)], 50).replicas == 3


def test_more_comes_at_once_and_fewer_only_after_the_whole_delay() -> None:
    up = decide(scale(1), 1, demand([load(used=1400)], 50), HOW, NOON)
    assert (up.replicas, up.lower) == (3, None)
    assert "1400 KV tokens used" in up.why and "needs 3 replicas by tokens" in up.why

    began = decide(up, 3, demand([load()] * 3, 50), HOW, NOON)
    assert began.replicas == 3
    second = NOON + timedelta(seconds=30)
    peak = decide(began, 3, demand([load(used=600), *[load()] * 2], 50), HOW, second)
    assert peak.lower == ScaleDownWindow("2026-11-22T12:00:00Z", 2)
    almost = decide(peak, 3, demand([load()] * 3, 50), HOW, NOON + timedelta(seconds=59))
    assert almost == peak
    # Down to the peak within the delay, not to the last reading.
    down = decide(almost, 3, demand([load()] * 3, 50), HOW, NOON + timedelta(seconds=60))
    assert (down.replicas, down.lower) == (2, None)


def test_a_load_that_comes_back_begins_the_delay_anew() -> None:
    began = decide(scale(3), 3, demand([load()] * 3, 50), HOW, NOON)
    assert began.lower is not None
    back = decide(began, 3, demand([load(used=1400), load(), load()], 50), HOW, NOON)
    assert (back.replicas, back.lower) == (3, None)


def test_a_replica_that_reports_no_load_is_not_idle() -> None:
    late = NOON + timedelta(hours=1)
    waited = Scale(VERSION, 4, "before", ScaleDownWindow("2026-11-22T12:00:00Z", 1))
    held = decide(waited, 4, demand([load(), None], 50), HOW, late)
    assert held == scale(4)
    # The load of the others may scale up: the missing one could only add to it.
    assert decide(waited, 4, demand([load(used=2600), None], 50), HOW, late).replicas == 6
    assert decide(waited, 4, demand([None], 50), HOW, late) == scale(4)
    assert decide(waited, 4, demand([], 50), HOW, late) == scale(4)


def test_the_need_of_one_replica_is_singular() -> None:
    assert "needs 1 replica by tokens, 0 by slots" in demand([load(used=500)], 50).text
    assert "needs 0 replicas by tokens, 1 by slots" in demand([load(running=5)], 50).text


def test_bounds_apply_to_the_stored_count_too() -> None:
    assert decide(scale(20), 0, demand([None], 50), HOW, NOON).replicas == 8
    narrow = Autoscaling(max_replicas=8, min_replicas=2)
    assert decide(None, 0, demand([], 50), narrow, NOON).replicas == 2
    assert (
        decide(None, 5, demand([], 50), narrow, NOON).replicas == 5
    )  # the Deployment's present replicas


@pytest.mark.parametrize(
    ("demanded", "kept", "ready", "reason", "words"),
    [
        ([load()], 1, 1, Activity.STABLE, "1 replica"),
        ([load()], 2, 2, Activity.STABLE, "2 replicas"),
        ([load()], 2, 1, Activity.SCALING, "to 2: before"),
        ([load(running=50)], 8, 1, Activity.AT_MAXIMUM, "the load needs more than"),
        ([load(), None], 2, 2, Activity.UNKNOWN, "1 ready replica without a report of load: 2"),
        ([None, None], 2, 2, Activity.UNKNOWN, "2 ready replicas without a report of load: 2"),
        ([], 1, 0, Activity.UNKNOWN, "no ready replica can report load: 1 or more are kept"),
        ([load(running=50)], 2, 2, Activity.SCALING, "the load needs more than 2; limited by"),
    ],
)
def test_reason_and_message(
    demanded: list[Load | None], kept: int, ready: int, reason: Activity, words: str
) -> None:
    actual, text = activity(scale(kept), demand(demanded, 50), HOW, ready)
    assert actual is reason and text.startswith(words)
    assert text.endswith("; spec.replicas follows the load between 1 and 8")
    assert "1 replicas" not in text


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
        '{"version":1,"replicas":3,"why":"","rises":[{"at":"noon","before":1}]}',
    ],
)
def test_an_unreadable_stored_count_counts_as_none(text: str | None) -> None:
    assert Scale.parse(text) is None


loads = st.builds(
    load,
    *[st.integers(0, 5000)] * 2,
    *[st.integers(0, 50)] * 3,
    st.none() | st.integers(-50, 50),
)  # used, waiting, running, queued, retrying, arriving


@given(st.lists(st.none() | loads, max_size=5), st.integers(1, 8), st.integers(0, 200))
def test_replicas_stay_in_bounds_and_never_sink_before_the_delay(
    replies: list[Load | None], replicas: int, seconds: int
) -> None:
    before = Scale(VERSION, replicas, "", ScaleDownWindow("2026-11-22T12:00:00Z", 1))
    demanded = demand(replies, HOW.target_percent)
    after = decide(before, replicas, demanded, HOW, NOON + timedelta(seconds=seconds))
    assert demanded.arriving <= demanded.replicas
    assert HOW.min_replicas <= after.replicas <= HOW.max_replicas
    if after.replicas < replicas:
        assert seconds >= HOW.scale_down_delay_seconds and None not in replies and replies
        assert after.replicas >= min(demanded.replicas, HOW.max_replicas)
    assert after.replicas >= min(demanded.arriving, HOW.max_replicas)
    assert Scale.parse(after.dumps()) == after
