"""The liveness probe fails without progress, and not because of a backlog."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kubernetes import client
from waiting import eventually

from kvline_operator.api.key import Key
from kvline_operator.errors import ApiUnavailable
from kvline_operator.kube import Kube, api_client
from kvline_operator.observe.claims import Claims
from kvline_operator.observe.ownership import Owners, PodOwnership
from kvline_operator.observe.reports import Reports
from kvline_operator.reconcile import Context
from kvline_operator.report.metrics import Metrics
from kvline_operator.report.status_cache import StatusCache
from kvline_operator.run.loop import STALL, Loop
from kvline_operator.run.resync import Resync
from kvline_operator.run.workqueue import WorkQueue
from kvline_operator.settings import Settings


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def loop(queue: WorkQueue) -> Loop:
    settings, board = Settings("image"), StatusCache()
    kube = Kube(api_client(client.Configuration()))
    reports, pool = Reports(1, 1.0, 1.0), ThreadPoolExecutor(1)
    context = Context(kube, settings, reports, pool, board, PodOwnership(kube), Claims(kube, "ns"))
    made = Loop(context, queue, Metrics(board, kube, queue), Resync(kube, (), Owners()), None)
    made.listed_at = time.monotonic()
    return made


def test_a_backlog_of_hours_that_is_worked_off_is_well() -> None:
    """A restart makes every service due at once, so a late operator would stay late for ever."""
    clock = Clock()
    queue = WorkQueue(clock)
    working = loop(queue)
    for number in range(4000):
        queue.add(Key("ns", f"s{number}"))
    for _ in range(100):
        key = queue.pop()
        assert key is not None
        clock.now += 60
        assert working.unhealthy() is None
        queue.done(key)
    assert queue.oldest_overdue() == 6000


def test_due_keys_without_a_reconcile_that_ends_are_unwell() -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    stuck = loop(queue)
    queue.add(Key("ns", "a"))
    assert queue.pop() is not None
    clock.now += STALL
    assert stuck.unhealthy() is None
    clock.now += 1
    assert stuck.unhealthy() == "keys are due and no reconcile has ended for 301 s"


def after_an_hour(
    changed: Callable[[], set[Key]], until: Callable[[], bool] | None = None
) -> str | None:
    """Why it is unwell, if its last list ended an hour ago and the next one is `changed`, once that
    has ended, or `until`."""
    away = loop(WorkQueue())
    away.resync.changed = changed  # type: ignore[method-assign]
    away.listed_at = hour_ago = time.monotonic() - 3600

    def is_time() -> bool:
        return away.listed_at != hour_ago if until is None else until()

    async def one_list() -> str | None:
        listing = asyncio.create_task(away._resync())
        await asyncio.to_thread(eventually, is_time, every=0.01)
        listing.cancel()
        return away.unhealthy()

    return asyncio.run(one_list())


def test_an_api_server_that_is_away_for_an_hour_restarts_no_operator() -> None:
    def fails() -> set[Key]:
        raise ApiUnavailable("connection refused")

    assert after_an_hour(fails) is None


def test_a_list_that_never_ends_is_unwell() -> None:
    began, free = threading.Event(), threading.Event()

    def hangs() -> set[Key]:
        began.set()
        free.wait()
        return set()

    unwell = after_an_hour(hangs, began.is_set)
    free.set()
    assert unwell == "no list of services has ended for too long"
