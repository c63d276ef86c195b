"""A replica's load as it reports it: retries are one sequence, a shrinking queue takes load off."""

from __future__ import annotations

import pytest

from kvline_server.ipc.messages import EdgeBeat
from kvline_server.parent.recent import Recent


def beat(rejected: int, ended: int) -> EdgeBeat:
    return EdgeBeat(ready=True, active=0, rejected=rejected, ended=ended)


def seconds(recent: Recent, first: int, last: int, **each: float) -> None:
    """One beat a second; `each` is per second, but for running and waiting."""
    for now in range(first, last + 1):
        recent.add(
            float(now),
            beat(round(each.get("rejected", 0) * now), round(each.get("ended", 0) * now)),
            int(each.get("running", 0)),
            round(each.get("waiting", 0) + each.get("growth", 0) * now),
        )


def test_nothing_is_known_before_the_first_beat_and_the_first_end() -> None:
    recent = Recent()
    assert (recent.rejected(5), recent.retrying(5), recent.arriving_milli(5)) == (0, 0, None)
    seconds(recent, 0, 60, running=4)
    assert recent.arriving_milli(60) is None


def test_a_steady_storm_of_retries_is_its_clients_and_no_arriving_load() -> None:
    recent = Recent()
    seconds(recent, 0, 120, running=10, ended=2, rejected=200, waiting=40)
    assert recent.rejected(120) == 12_000
    assert recent.retrying(120) == 200
    assert recent.arriving_milli(120) == 10_000  # the ten that run: 2 a second of 5 s each


def test_clients_that_join_the_storm_arrive_at_the_rate_they_join() -> None:
    """Three more a second, each rejected once a second; an answer takes 5 s of a place."""
    recent = Recent()
    for now in range(121):
        recent.add(float(now), beat(3 * now * now // 2, 2 * now), 10, 40)
    assert recent.arriving_milli(120) == pytest.approx(10_000 + 3 * 5000, rel=0.02)


def test_a_queue_that_is_worked_off_takes_load_off() -> None:
    recent = Recent()
    seconds(recent, 0, 120, running=10, ended=2, waiting=240, growth=-2)
    assert recent.arriving_milli(120) == pytest.approx(0, abs=1)


def test_rejections_are_forgotten_after_a_minute_and_samples_stay_few() -> None:
    recent = Recent()
    for number in range(4000):  # two a second
        recent.add(number / 2, beat(min(number, 10), 0), 0, 0)
    assert recent.rejected(2000.0) == 0
    assert len(recent._samples) <= 310
