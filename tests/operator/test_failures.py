"""Each error of a reconcile ends in a condition, and the reconcile itself stays a story."""

from __future__ import annotations

import copy
import inspect
import itertools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from services import BODY

from kvline_contract.names import PLURAL
from kvline_operator import kube
from kvline_operator.answers import Refusal
from kvline_operator.api.key import Key
from kvline_operator.errors import (
    ApiError,
    ApiUnavailable,
    Deleting,
    Missing,
    NameConflict,
    SpecError,
)
from kvline_operator.kube import KINDS, Call, Kube
from kvline_operator.observe.claims import Claims
from kvline_operator.observe.ownership import PodOwnership
from kvline_operator.observe.reports import Reports
from kvline_operator.reconcile import Context, reconcile
from kvline_operator.report import failures, status
from kvline_operator.report.status_cache import StatusCache
from kvline_operator.settings import Settings

Object = dict[str, Any]
CHAT = Key("ns", "chat")
FORBIDDEN = 'deployments.apps "chat" is forbidden: '


class Cluster(Kube):
    """An API server that has the service alone, and answers each other call as `fails` says."""

    def __init__(self, fails: Callable[[Call], tuple[int, str] | None]) -> None:
        self.fails = fails
        self.service: Object = copy.deepcopy(BODY)
        self.service["metadata"] |= {"resourceVersion": "7"}
        self.events: list[str] = []
        self.status_writes = 0
        self.writes = 0
        self.may_write = lambda: True

    def _raw(self, call: Call) -> bytes:
        found = self.fails(call)
        if found is not None:
            code, message = found
            raise kube._error(call, code, json.dumps({"message": message}).encode(), 0.0)
        if call.path.endswith("/chat/status"):
            self.service["status"] = call.body[-1]["value"]
            self.status_writes += 1
        if call.path.endswith("/events"):
            self.events.append(call.body["reason"])
        if call.method == "GET":
            return self._read(call)
        meta = {**call.body["metadata"], "uid": "x"} if isinstance(call.body, dict) else {}
        return json.dumps({**call.body, "metadata": meta} if meta else {}).encode()

    def _read(self, call: Call) -> bytes:
        if call.path.endswith(f"{PLURAL}/chat"):
            return json.dumps(self.service).encode()
        if call.path.rpartition("/")[2] not in {plural for _, plural in KINDS.values()}:
            raise Missing(call.what)
        return b'{"items": []}'

    def condition(self, kind: str) -> Object:
        made = self.service.get("status", {}).get("conditions", [])
        return next((c for c in made if c["type"] == kind), {})


def run(cluster: Cluster) -> tuple[float, Exception | None]:
    """One reconcile: seconds to the next, or what it raised."""
    reports, pool = Reports(1, 1.0, 1.0), ThreadPoolExecutor(2)
    parts = reports, pool, StatusCache(), PodOwnership(cluster), Claims(cluster, "ns")
    context = Context(cluster, Settings("registry/server:1"), *parts)
    try:
        return reconcile(context, CHAT), None
    except Exception as error:
        return 0.0, error
    finally:
        pool.shutdown()


def on(method: str, part: str, code: int, *messages: str) -> Callable[[Call], Any]:
    turn = itertools.cycle(messages)
    return lambda c: (code, next(turn)) if c.method == method and part in c.path else None


DENIED = 'admission webhook "x" denied the request: no'
DEAD = 'Internal error occurred: failed calling webhook "x": dial tcp 10.0.0.1:4{}: refused'
CASES = [
    ("GET", "/pods", 503, "", "Progressing", "ApiUnavailable"),
    ("GET", "/deployments", 403, f'{FORBIDDEN}User "x" cannot list', "Accepted", "Forbidden"),
    ("GET", "/rolebindings/", 403, f'{FORBIDDEN}User "x" cannot get', "Accepted", "Forbidden"),
    ("PATCH", "/services/", 500, DEAD.format(1), "Progressing", "WebhookUnavailable"),
    ("PATCH", "/deployments/", 403, DENIED, "Progressing", "AdmissionDenied"),
    ("PATCH", "/deployments/", 500, DENIED, "Progressing", "AdmissionDenied"),
    (
        "PATCH",
        "/deployments/",
        403,
        f"{FORBIDDEN}exceeded quota: q, requested: x=1",
        "Progressing",
        "QuotaExceeded",
    ),
    ("PATCH", "/configmaps/", 422, "it is invalid", "Accepted", "SpecInvalid"),
    ("PATCH", "/controllerrevisions/", 409, "", "Progressing", "ApiUnavailable"),
]


@pytest.mark.parametrize(("method", "part", "code", "message", "kind", "reason"), CASES)
def test_an_error_on_the_way_ends_in_a_status_with_its_cause(
    method: str, part: str, code: int, message: str, kind: str, reason: str
) -> None:
    cluster = Cluster(on(method, part, code, message))
    seconds, raised = run(cluster)
    made = cluster.condition(kind)
    assert (made["status"], made["reason"]) == ("False", reason)
    assert f"HTTP {code}" in made["message"] and message in made["message"]
    assert cluster.condition("Ready")["reason"] == reason
    passes = reason in ("ApiUnavailable", "WebhookUnavailable")
    assert isinstance(raised, ApiUnavailable) if passes else 0 < seconds <= 60
    if reason != "ApiUnavailable":
        assert cluster.events == [reason]


def test_an_error_of_the_operator_itself_is_in_the_status_too() -> None:
    def breaks(call: Call) -> None:
        if "/pods" in call.path:
            raise KeyError("a secret of the log")

    cluster = Cluster(breaks)
    assert isinstance(run(cluster)[1], KeyError)
    assert cluster.condition("Progressing")["reason"] == "InternalError"
    assert "secret" not in cluster.condition("Progressing")["message"]


def test_an_error_of_the_status_itself_is_in_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    """What serves goes on to, and the user sees why the rest is of before."""

    def breaks(*_: Any) -> None:
        raise KeyError("tokens")

    monkeypatch.setattr(status, "build", breaks)
    cluster = Cluster(lambda call: None)
    for _ in range(2):
        assert isinstance(run(cluster)[1], KeyError)
    assert cluster.condition("Progressing")["reason"] == "InternalError"
    assert cluster.status_writes == 1 and cluster.events == ["InternalError"]


def test_a_message_that_differs_at_each_try_is_written_once() -> None:
    """A write of the status is an event, and the event the next try: at once, and not later."""
    cluster = Cluster(on("PATCH", "/services/", 500, *(DEAD.format(n) for n in range(9))))
    for _ in range(3):
        run(cluster)
    assert cluster.status_writes == 1 and cluster.events == ["WebhookUnavailable"]


def test_a_refusal_that_differs_at_each_try_is_written_once_for_a_generation() -> None:
    """Webhooks put a request's id or the time into what they say."""
    denied = [f"{DENIED}, request {n}" for n in range(9)]
    cluster = Cluster(on("PATCH", "/deployments/", 403, *denied))
    for _ in range(3):
        run(cluster)
    assert cluster.status_writes == 1 and cluster.events == ["AdmissionDenied"]
    cluster.service["metadata"]["generation"] += 1
    run(cluster)
    assert "request 3" in cluster.condition("Progressing")["message"]


def test_the_next_of_several_refused_calls_is_named() -> None:
    """As one after another is allowed."""
    text = f'{FORBIDDEN}User "x" cannot list'
    cluster = Cluster(on("GET", "/deployments", 403, text))
    run(cluster)
    cluster.fails = on("GET", "/pods", 403, text)
    run(cluster)
    assert "GET Pod" in cluster.condition("Accepted")["message"]


def test_an_event_that_is_refused_keeps_no_status_back(caplog: pytest.LogCaptureFixture) -> None:
    def refuses(call: Call) -> tuple[int, str] | None:
        return (500, DEAD) if call.method != "GET" and "status" not in call.path else None

    cluster = Cluster(refuses)
    run(cluster)
    assert cluster.condition("Progressing")["reason"] == "WebhookUnavailable"
    assert "no event WebhookUnavailable" in caplog.text


def test_where_the_status_is_refused_too_the_log_has_both(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(lambda c: (403, DENIED) if c.method == "PATCH" else None)
    assert isinstance(run(cluster)[1], ApiError)
    assert "PATCH ServiceAccount ns/chat: HTTP 403" in caplog.text


def test_a_service_that_is_gone_when_its_status_is_written_is_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = Cluster(lambda c: (404, "not found") if c.path.endswith("/status") else None)
    assert run(cluster)[1] is None
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


def test_what_serves_stays_ready_while_nothing_can_be_read() -> None:
    cluster = Cluster(on("GET", "/pods", 503, ""))
    was = {"type": "Ready", "status": "True", "reason": "Serving", "message": "1 replica serves"}
    cluster.service["status"] = {"conditions": [was], "readyReplicas": 1}
    run(cluster)
    assert cluster.condition("Ready") == was
    assert cluster.condition("Reconciling")["reason"] == "ApiUnavailable"
    assert cluster.service["status"]["readyReplicas"] == 1


def test_every_refusal_and_every_error_of_ours_has_its_row() -> None:
    assert {str(refusal) for refusal in Refusal} <= failures.TABLE.keys()
    own = [SpecError("x"), NameConflict("x"), Deleting("x"), ValueError("x")]
    assert {failures.reason(error) for error in own} <= failures.TABLE.keys()


@pytest.mark.parametrize("children", ["none", "orphan"])
@pytest.mark.parametrize("later", ["", "u2", "going"])
def test_a_service_that_goes_while_it_is_read_gets_and_takes_no_child(
    later: str, children: str
) -> None:
    """Its children lose their owner, or are collected, in the moment in which they are read. An
    owner written back would be one that is gone, and Kubernetes would delete them with it."""
    cluster = Cluster(lambda call: None)
    read, times = cluster._read, itertools.count()
    kinds = {"serviceaccounts", "services", "networkpolicies", "poddisruptionbudgets"}

    def going(call: Call) -> bytes:
        kind = call.path.split("/")[-2]
        if children == "orphan" and kind in kinds:
            return json.dumps({"kind": kind, "metadata": {"name": "chat"}}).encode()
        if kind == PLURAL and next(times):
            if not later:
                raise Missing(call.what)
            change = {"deletionTimestamp": "now"} if later == "going" else {"uid": later}
            cluster.service["metadata"] |= change
        return read(call)

    cluster._read = going  # type: ignore[method-assign]
    assert run(cluster) == (0.0, None)
    assert cluster.writes == 0


def test_reconcile_is_a_story_of_at_most_forty_lines() -> None:
    assert len(inspect.getsource(reconcile).splitlines()) <= 40
