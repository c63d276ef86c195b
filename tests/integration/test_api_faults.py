"""An API server that loses events, is slow, refuses or is unreachable, played by a proxy before the
real one."""

from __future__ import annotations

import itertools
import json
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playground import Node, Operator, Space, eventually, serve
from proxy import Proxy

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

ACCOUNT = "kvline-system-kvline-operator.kubeconfig"
RESYNC = 20  # seconds; the resync interval of these tests


@pytest.fixture
def proxy(space: Space, tmp_path: Path) -> Iterator[Proxy]:
    made = Proxy(space.cluster.kubeconfig.parent / ACCOUNT, tmp_path)
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture
def behind(space: Space, proxy: Proxy, tmp_path: Path) -> Iterator[Operator]:
    """An operator that reaches the API server only through the proxy."""
    made = Operator(space, tmp_path / "operator.log", kubeconfig=proxy.kubeconfig).start()
    eventually(lambda: _answers(made))
    yield made
    made.stop()
    text = made.log.read_text()
    assert "Traceback" not in text, text[-3000:]


def _answers(operator: Operator) -> bool:
    try:
        healthy(operator)
    except OSError:
        return False
    return True


def healthy(operator: Operator) -> float:
    """Seconds until the probe reported that all is well."""
    began = time.monotonic()
    url = f"http://127.0.0.1:{operator.probe_port}/healthz"
    assert urllib.request.urlopen(url, timeout=10).status == 200
    return time.monotonic() - began


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
    shows="a swallowed DELETE is made good within 35 s, with a resync of 20 s here",
)
def test_a_lost_event_is_made_good_by_the_next_resync(
    space: Space, proxy: Proxy, behind: Operator, node: Node, until: Callable[..., Any]
) -> None:
    """F04."""
    serve(space, node)
    proxy.swallow = lambda event: event["type"] == "DELETED"
    space.kubectl("delete", "serviceaccount", "chat")
    until(lambda: space.get("serviceaccount", "chat"), RESYNC + 15)
    kinds = [event["object"]["kind"] for event in proxy.swallowed]
    assert "ServiceAccount" in kinds


@pytest.mark.fault(
    "F08",
    shows="watches open and silent: changes are found by the resync, 20 s here, within 35 s",
)
def test_watches_that_say_nothing_any_more_hide_no_change_for_long(
    space: Space, proxy: Proxy, behind: Operator, node: Node, until: Callable[..., Any]
) -> None:
    """F08."""
    serve(space, node)
    proxy.swallow = lambda event: True
    space.kubectl("delete", "pdb", "chat")
    space.apply(replicas=2)
    until(lambda: space.get("pdb", "chat"), RESYNC + 15)
    until(lambda: len(node.pods()) == 2, RESYNC + 15)
    assert proxy.swallowed


def test_watches_that_are_gone_are_opened_anew(
    space: Space, proxy: Proxy, behind: Operator, node: Node, until: Callable[..., Any]
) -> None:
    """F07."""
    serve(space, node)
    proxy.gone = 9
    space.kubectl("label", "kvl,pdb,serviceaccount", "--all", "touched=yes")
    until(lambda: proxy.gone < 9)  # one watch was answered 410
    proxy.gone = 0
    space.kubectl("delete", "serviceaccount", "chat")
    until(lambda: space.get("serviceaccount", "chat"), RESYNC / 2)


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
    time.sleep(10)
    proxy.answer = lambda method, path: None
    serve(space, node)
    healthy(behind)


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
    began = time.monotonic()
    while len(space.list("deployments")) < 3:
        assert healthy(behind) < 1.0
        assert time.monotonic() - began < 90
        time.sleep(1)


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
    time.sleep(12)
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
    time.sleep(15)
    healthy(behind)
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


def test_an_operator_whose_watches_are_dead_says_so(
    space: Space, proxy: Proxy, behind: Operator, node: Node, until: Callable[..., Any]
) -> None:
    """F09: resyncs still find changes; changes without events fail the liveness probe, and the
    restarted operator is healthy."""
    serve(space, node)
    proxy.swallow = lambda event: True
    space.kubectl("delete", "pdb", "chat")
    until(lambda: space.get("pdb", "chat"), RESYNC + 15)
    until(lambda: "a watch is dead" in _unwell(behind), 2 * RESYNC + 15)
    proxy.swallow = lambda event: False
    behind.stop()
    behind.start()
    until(lambda: _answers(behind))
    space.apply(replicas=2)
    until(lambda: len(node.pods()) == 2)


def _unwell(operator: Operator) -> str:
    """The body of the failing probe."""
    try:
        healthy(operator)
    except urllib.error.HTTPError as error:
        return error.read().decode()
    return ""
