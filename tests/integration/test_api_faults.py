"""An API server that loses events, is slow, refuses or is unreachable, played by a proxy before the
real one."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from playground import Node, Operator, Space, serve
from proxy import Proxy
from waiting import within

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

RESYNC = 5  # seconds, where a test waits for a resync
REPAIRED = RESYNC + 15
NONE_HELPS = 300  # seconds, the operator's default: none repairs what a watch has missed


def test_nothing_is_decided_or_reported_on_old_data(
    space: Space, proxy: Proxy, behind: Operator, node: Node, until: Callable[..., Any]
) -> None:
    """F05: every read is consistent, so that no cache of the API server may answer with old data; a
    status patch based on an old version is refused and computed again."""
    raced: list[str] = []

    def meanwhile(method: str, path: str) -> None:
        if method == "PATCH" and "chat/status" in path and not raced:
            raced.append(path)
            space.kubectl("annotate", "kvl", "chat", "touched=yes")

    proxy.answer = meanwhile
    serve(space, node)
    space.apply(replicas=2)
    until(lambda: len(node.pods()) == 2)
    assert raced and sum("chat/status" in path for path in proxy.writes) > 1
    ours = [path for path in proxy.reads if "chat" in path or "labelSelector" in path]
    assert ours and not [path for path in ours if "resourceVersion" in path]
    log = behind.log.read_text()
    assert "HTTP 422" in log or "HTTP 409" in log


@pytest.mark.fault(
    "F04",
    shows="a swallowed DELETE is made good within 20 s, with a resync of 5 s here",
)
@pytest.mark.parametrize("resync", [RESYNC])
def test_a_lost_event_is_made_good_by_the_next_resync(
    space: Space, proxy: Proxy, behind: Operator, node: Node, until: Callable[..., Any]
) -> None:
    """F04."""
    serve(space, node)
    proxy.swallow = lambda event: event["type"] == "DELETED"
    space.kubectl("delete", "serviceaccount", "chat")
    until(lambda: space.get("serviceaccount", "chat"), REPAIRED)
    kinds = [event["object"]["kind"] for event in proxy.swallowed]
    assert "ServiceAccount" in kinds


@pytest.mark.fault(
    "F08",
    shows="watches open and silent: changes are found by the resync, 5 s here, within 20 s",
)
@pytest.mark.parametrize("resync", [RESYNC])
def test_watches_that_say_nothing_any_more_hide_no_change_for_long(
    space: Space, proxy: Proxy, behind: Operator, node: Node, until: Callable[..., Any]
) -> None:
    """F08."""
    serve(space, node)
    proxy.swallow = lambda event: True
    space.kubectl("delete", "pdb", "chat")
    space.apply(replicas=2)
    until(lambda: space.get("pdb", "chat"), REPAIRED)
    until(lambda: len(node.pods()) == 2, REPAIRED)
    assert proxy.swallowed


@pytest.mark.parametrize("resync", [NONE_HELPS])
def test_watches_that_are_gone_are_opened_anew(
    space: Space, proxy: Proxy, behind: Operator, node: Node, until: Callable[..., Any]
) -> None:
    """F07."""
    serve(space, node)
    proxy.gone, opened = 9, proxy.opened
    space.kubectl("label", "kvl,pdb,serviceaccount", "--all", "touched=yes")
    until(lambda: proxy.ended >= 3)  # of each kind
    proxy.gone = 0
    until(lambda: proxy.opened >= opened + proxy.ended)
    for kind in ("serviceaccount", "pdb"):
        space.kubectl("delete", kind, "chat")
        until(lambda kind=kind: space.get(kind, "chat"))


@pytest.mark.fault(
    "F10",
    shows="3 of 10 calls answered 503, 500 or 429 with Retry-After 2 for 10 s after each was "
    "met (not 60 s), then the service is served",
)
def test_an_api_server_that_fails_now_and_then_is_asked_again(
    space: Space, proxy: Proxy, behind: Operator, node: Node, until: Callable[..., Any]
) -> None:
    """F10: of ten calls one is answered 503, one 429 and one 500."""
    turn = itertools.count()
    kinds = {0: (503, {}), 3: (429, {"Retry-After": "2"}), 6: (500, {})}
    met = Counter[int]()

    def now_and_then(method: str, path: str) -> Any:
        answer = None if "watch" in path else kinds.get(next(turn) % 10)
        met.update([answer[0]] if answer else [])
        return answer

    proxy.answer = now_and_then
    space.apply()
    until(lambda: set(met) == {503, 429, 500}, 60)
    time.sleep(10)  # how long the fault lasts
    proxy.answer = lambda method, path: None
    serve(space, node)
    assert behind.is_well()


@pytest.mark.fault(
    "F11",
    shows="each call takes 1 s (not 5 s): the probe answers within 1 s and three services have "
    "their Deployments within 90 s",
)
def test_a_slow_api_server_stops_neither_the_probe_nor_the_others(
    space: Space, proxy: Proxy, behind: Operator, until: Callable[..., Any]
) -> None:
    """F11."""
    proxy.delay = 1.0
    for name in ("chat", "talk", "speak"):
        space.apply(name)

    def all_there() -> bool:
        with within(1):
            assert behind.is_well()
        return len(space.list("deployments")) == 3

    until(all_there, 90, every=1)


@pytest.mark.fault(
    "F12",
    shows="12 s (not 30 s) of 409 on all writes but the Lease's: 1 to 10 writes, then it is served",
)
def test_writes_that_conflict_are_not_hammered(
    space: Space, proxy: Proxy, behind: Operator, node: Node, until: Callable[..., Any]
) -> None:
    """F12."""
    free = "/leases"  # without its Lease it would never write
    proxy.answer = lambda method, path: None if method == "GET" or free in path else (409, {})
    space.apply()
    time.sleep(12)  # a rate is what is shown
    writes = [write for write in proxy.writes if free not in write]
    assert 1 <= len(writes) <= 10, writes
    proxy.answer = lambda method, path: None
    serve(space, node)


@pytest.mark.fault(
    "F13",
    "L08",
    shows="15 s apart (not 120 s) at a proxy: no pod is touched, the probe is well, and 60 s "
    "after a changed count and a deleted budget are done",
)
def test_changes_during_a_partition_are_applied_afterwards(
    space: Space, proxy: Proxy, behind: Operator, node: Node, until: Callable[..., Any]
) -> None:
    """F13, L08."""
    serve(space, node)
    proxy.apart = True
    before = [p["metadata"]["uid"] for p in node.pods()]
    space.apply(replicas=2)
    space.kubectl("delete", "pdb", "chat")
    time.sleep(15)  # how long the fault lasts: the Lease runs out meanwhile
    assert behind.is_well()
    assert [p["metadata"]["uid"] for p in node.pods()] == before
    proxy.apart = False
    until(lambda: space.get("pdb", "chat") and len(node.pods()) == 2, 60)


def test_a_status_that_is_refused_stops_no_child(
    space: Space, proxy: Proxy, behind: Operator, node: Node, until: Callable[..., Any]
) -> None:
    """F42."""

    def refused(method: str, path: str) -> Any:
        return (422, {}) if method == "PATCH" and "chat/status" in path else None

    proxy.answer = refused
    space.apply()
    until(lambda: space.list("deployments"))
    until(lambda: sum("chat/status" in path for path in proxy.writes) >= 2)
    assert not (space.get("kvl", "chat") or {}).get("status")
    assert json.loads(space.kubectl("get", "pods", "-o", "json").stdout)["items"]
    proxy.answer = lambda method, path: None
    serve(space, node)


@pytest.mark.parametrize("resync", [RESYNC])
def test_an_operator_whose_watches_are_dead_says_so(
    space: Space, proxy: Proxy, behind: Operator, node: Node, until: Callable[..., Any]
) -> None:
    """F09: resyncs still find changes; changes without events fail the liveness probe, and the
    restarted operator is healthy."""
    serve(space, node)
    proxy.swallow = lambda event: True
    space.kubectl("delete", "pdb", "chat")
    until(lambda: space.get("pdb", "chat"), REPAIRED)
    until(lambda: "a watch is dead" in behind.health(), RESYNC + REPAIRED)
    proxy.swallow = lambda event: False
    behind.stop()
    behind.start()
    until(behind.is_well)
    space.apply(replicas=2)
    until(lambda: len(node.pods()) == 2)
