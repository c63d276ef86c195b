"""The Lease with fake time: one holder, and no write by an operator that may not hold it."""

from __future__ import annotations

import asyncio
import copy
import threading
from typing import Any

import pytest
from kubernetes import client
from waiting import eventually, limit

from kvline_operator.errors import ApiUnavailable, Forbidden
from kvline_operator.kube import Kube
from kvline_operator.run.lease import DEADLINE, DURATION, RENEW, Lease

NAME = ("ns", "kvline-operator")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Cluster(Kube):
    """An API with one Lease and its resourceVersion."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.apart = False
        self.writes = 0

    def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        if self.apart:
            raise ApiUnavailable("apart")
        return copy.deepcopy(self.lease)

    def put_lease(self, body: dict[str, Any]) -> bool:
        known = self.lease["metadata"]["resourceVersion"] if self.lease else None
        if self.apart or body["metadata"].get("resourceVersion") != known:
            return False
        self.lease = copy.deepcopy(body)
        self.lease["metadata"]["resourceVersion"] = str(int(known or 0) + 1)
        return True


@pytest.fixture
def clock() -> Clock:
    return Clock()


def two(clock: Clock) -> tuple[Cluster, Lease, Lease]:
    cluster = Cluster()
    one, other = (Lease(cluster, NAME, name, clock) for name in ("one", "other"))
    assert one.attempt() and not other.attempt()
    return cluster, one, other


def test_a_holder_that_renews_stays_it(clock: Clock) -> None:
    _, one, other = two(clock)
    for _ in range(20):
        clock.now += RENEW
        assert one.held() and one.attempt()
        assert not other.attempt() and other.holder == "one" and not other.held()


def test_a_dead_holder_is_followed_and_has_stopped_writing_before(clock: Clock) -> None:
    """F17: a holder stops writing (DEADLINE) before another may take the Lease (DURATION), so two
    never write at once."""
    cluster, one, other = two(clock)
    cluster.apart = True  # for the holder
    clock.now += DEADLINE
    assert not one.held()
    cluster.apart = False
    clock.now += DURATION - DEADLINE - 0.1
    assert not other.attempt()
    clock.now += 0.1
    assert other.attempt() and other.held()
    assert not one.attempt() and one.holder == "other" and not one.held()
    assert cluster.lease is not None and cluster.lease["spec"]["leaseTransitions"] == 1


def test_one_that_was_apart_goes_on_where_nobody_took_it(clock: Clock) -> None:
    """F13: an unreachable API server causes no restart."""
    cluster, one, _ = two(clock)
    cluster.apart = True
    clock.now += 1000
    assert not one.held()
    cluster.apart = False
    assert one.attempt() and one.held()


def test_what_is_given_back_is_free_at_once_and_writes_end(clock: Clock) -> None:
    _, one, other = two(clock)
    one.release()
    assert not one.held()
    assert other.attempt() and other.held()


def test_a_renewal_on_its_way_does_not_give_back_the_right_to_write(clock: Clock) -> None:
    cluster, one, _ = two(clock)
    began, go = threading.Event(), threading.Event()
    read = cluster.get

    def slow(kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        began.set()
        go.wait(limit(5))
        return read(kind, namespace, name)

    cluster.get = slow  # type: ignore[method-assign]
    renewal = one._thread.submit(one.attempt)
    assert began.wait(limit(5))
    ends = one._thread.shutdown

    def waits() -> None:
        go.set()  # not before the release waits for it
        ends()

    one._thread.shutdown = waits  # type: ignore[method-assign, assignment]
    one.release()
    assert renewal.result() and not one.held()
    assert cluster.lease is not None and cluster.lease["spec"]["holderIdentity"] == ""


def test_the_same_container_goes_on_at_once_after_its_restart(clock: Clock) -> None:
    cluster, _, _ = two(clock)
    assert Lease(cluster, NAME, "one", clock).attempt()


def test_of_two_that_take_it_at_once_one_does(clock: Clock) -> None:
    cluster, _, other = two(clock)
    third = Lease(cluster, NAME, "third", clock)
    assert not third.attempt()
    clock.now += DURATION
    read = cluster.get

    def slow(kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        found = read(kind, namespace, name)
        cluster.get = read  # type: ignore[method-assign]
        assert other.attempt()  # between third's read and its write
        return found

    cluster.get = slow  # type: ignore[method-assign]
    assert not third.attempt() and not third.held()


def test_a_lease_that_somebody_deleted_is_made_anew(clock: Clock) -> None:
    cluster, one, _ = two(clock)
    cluster.lease = None
    assert one.attempt() and one.held()


def test_a_wall_clock_that_jumps_changes_nothing(clock: Clock) -> None:
    """F43: the timestamps in the Lease are not read, so a changed wall clock has no effect."""
    cluster, one, other = two(clock)
    assert cluster.lease is not None
    cluster.lease["spec"]["renewTime"] = "1970-01-01T00:00:00.000000Z"
    assert not other.attempt() and one.held()


def test_a_right_that_is_missing_ends_the_start_and_not_a_holder(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """F15: a missing right ends the start at once; a running operator survives the replacement of
    its role."""

    class Refused(Cluster):
        def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
            raise Forbidden("GET Lease ns/kvline-operator: HTTP 403")

    with pytest.raises(Forbidden):
        asyncio.run(Lease(Refused(), NAME, "one", clock).acquire())
    cluster, one, _ = two(clock)
    cluster.get = Refused().get  # type: ignore[method-assign]

    async def keeps() -> bool:
        keeping = asyncio.create_task(one.keep())
        await asyncio.to_thread(eventually, lambda: "or renewed: GET Lease" in caplog.text)
        return not keeping.done()

    assert asyncio.run(keeps())


def test_nothing_is_written_by_one_that_does_not_hold_it() -> None:
    kube = Kube(client.ApiClient())
    kube.may_write = lambda: False
    body = {"kind": "ConfigMap", "metadata": {"name": "a", "namespace": "ns"}}
    for write in (
        lambda: kube.apply(body),
        lambda: kube.create(body),
        lambda: kube.replace_status("ns", "chat", {}, "1"),
        lambda: kube.json_patch("ConfigMap", "ns", "a", []),
        lambda: kube.delete("ConfigMap", "ns", "a", "uid"),
    ):
        with pytest.raises(ApiUnavailable, match="could not renew its lease"):
            write()
    assert kube.writes == 0


def test_a_holder_s_page_at_one_s_own_address_is_no_other_s(clock: Clock) -> None:
    """A new pod may get the IP of the holder that is gone."""
    cluster = Cluster()
    gone = Lease(cluster, NAME, "gone", clock, page="10.0.0.1:8082")
    new = Lease(cluster, NAME, "new", clock, page="10.0.0.1:8082")
    assert gone.attempt() and not new.attempt()
    assert (new.holder, new.holders_page) == ("gone", "")


def test_a_standby_knows_where_the_holder_s_page_is(clock: Clock) -> None:
    cluster = Cluster()
    one = Lease(cluster, NAME, "one", clock, page="10.0.0.1:8082")
    other = Lease(cluster, NAME, "other", clock, page="10.0.0.2:8082")
    assert one.attempt() and not other.attempt()
    assert (one.holders_page, other.holders_page) == ("", "10.0.0.1:8082")
    one.release()
    assert other.attempt() and not one.attempt()
    assert (one.holders_page, other.holders_page) == ("10.0.0.2:8082", "")
