"""The queue with fake time: each key once, backoff per key, nothing lost."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import limit

from kvline_operator.api.key import Key
from kvline_operator.run.workqueue import KEPT, REMEMBERED, SLOW, WorkQueue


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


A, B = Key("ns", "a"), Key("ns", "b")


def test_a_thousand_events_are_one_key() -> None:
    """F06."""
    queue = WorkQueue(Clock())
    for _ in range(1000):
        queue.add(A)
    assert queue.pop() == A
    assert queue.pop() is None


def test_news_during_work_runs_the_key_once_more_afterwards() -> None:
    queue = WorkQueue(Clock())
    queue.add(A)
    assert queue.pop() == A
    queue.add(A)
    queue.add(A)
    assert queue.pop() is None
    queue.done(A)
    assert queue.pop() == A
    queue.done(A)
    assert queue.pop() is None


def test_an_earlier_wish_wins() -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    queue.add(A, 100)
    queue.add(A, 5)
    queue.add(A, 50)
    assert queue.pop() is None
    clock.now += 5
    assert queue.pop() == A
    queue.done(A)
    clock.now += 1000
    assert queue.pop() is None


def test_backoff_doubles_to_a_minute_and_is_per_key() -> None:
    """F20."""
    queue = WorkQueue(Clock())
    assert [queue.retry(A) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert queue.retry(B) == 1
    queue.succeeded(A)
    assert queue.retry(A) == 1
    assert queue.retry(A, least=7) == 7, "an API server that says when to come back is obeyed"


def test_a_key_that_nobody_takes_is_late_and_a_stall() -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    clock.now += 5000  # idle: no stall
    assert queue.stalled() == 0
    queue.add(A)
    clock.now += 130
    assert queue.oldest_overdue() == queue.stalled() == 130


def test_a_key_that_nobody_finishes_is_a_stall_and_a_later_one_is_none() -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    queue.add(A)
    queue.add(B, 500)
    assert queue.pop() == A
    clock.now += 400
    assert queue.stalled() == 400
    queue.done(A)
    assert queue.stalled() == 0
    clock.now += 150
    assert queue.stalled() == 50, "since it is due"


@given(st.lists(st.tuples(st.sampled_from([A, B]), st.integers(0, 20)), max_size=30))
def test_every_added_key_comes_out_when_it_is_due(adds: list[tuple[Key, int]]) -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    for key, delay in adds:
        queue.add(key, delay)
    seen: dict[Key, float] = {}
    for _ in range(25):
        while (due := queue.pop()) is not None:
            assert due not in seen
            seen[due] = clock.now - 1000
            queue.done(due)
        clock.now += 1
    wanted = {key: min(d for k, d in adds if k == key) for key, _ in adds}
    assert seen == wanted


def test_a_waiting_worker_wakes_for_news() -> None:
    async def story() -> Key:
        queue = WorkQueue()
        waiting = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        queue.add(B)
        return await asyncio.wait_for(waiting, limit(1))

    assert asyncio.run(story()) == B


@pytest.mark.fault("F77", shows="two workers stay for namespaces whose reconciles are quick")
def test_a_namespace_whose_keys_take_long_leaves_workers_to_others() -> None:
    """An admission webhook that hangs for half a minute: with all workers on its namespace, a new
    service elsewhere had no status for two minutes."""
    clock = Clock()
    queue = WorkQueue(clock, workers=4)
    hung = [Key("hung", str(index)) for index in range(9)]
    for key in hung:
        queue.add(key)
    first = [queue.pop() for _ in range(4)]
    clock.now += 30
    for key in filter(None, first):
        queue.done(key)
    taken = [queue.pop() for _ in range(4)]
    assert len([key for key in taken if key is not None]) == 4 - KEPT
    queue.add(A)
    assert queue.pop() == A and queue.pop() is None
    assert queue.oldest_overdue() == 0, "they are not late for want of workers"
    clock.now += SLOW / 2
    for key in filter(None, taken):
        queue.done(key)
    again = [queue.pop() for _ in range(4)]
    assert len([key for key in again if key is not None]) == 4 - KEPT, "one quick key is no proof"
    for key in (A, *filter(None, again)):
        queue.done(key)
    clock.now += REMEMBERED
    for key in hung:
        queue.add(key)
    assert None not in [queue.pop() for _ in range(4)]


def test_a_namespace_that_was_slow_is_forgotten() -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    for index in range(100):
        key = Key(f"namespace-{index}", "service")
        queue.add(key)
        assert queue.pop() == key
        clock.now += SLOW + 1
        queue.done(key)
    assert len(queue._slow) <= 1 + REMEMBERED / (SLOW + 1), "those of the last two minutes"
