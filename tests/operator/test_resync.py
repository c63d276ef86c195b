"""Missed changes: services whose objects have other resourceVersions than their events had."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from kvline_contract.names import KIND, LABEL_SERVICE
from kvline_operator.api.key import Key
from kvline_operator.errors import ApiUnavailable, Forbidden, Missing
from kvline_operator.kube import EARLIER_KIND, Kube
from kvline_operator.observe.ownership import Owners
from kvline_operator.run.resync import Resync

A, B = Key("team", "a"), Key("team", "b")


class Cluster(Kube):
    """Objects by kind and name, each with a version."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}

    def put(self, kind: str, name: str, version: int, service: str = "", owner: str = "") -> None:
        meta: dict[str, Any] = {"namespace": "team", "name": name, "uid": f"{kind}-{name}"}
        meta["resourceVersion"] = str(version)
        if service:
            meta["labels"] = {LABEL_SERVICE: service}
        if owner:
            meta["ownerReferences"] = [{"kind": KIND, "name": owner}]
        self.objects[kind, name] = meta

    def metadata(
        self, kind: str, namespaces: tuple[str, ...], selector: str = ""
    ) -> Iterator[dict[str, Any]]:
        return iter([meta for (of, _), meta in self.objects.items() if of == kind])


def cluster() -> tuple[Cluster, Resync]:
    made = Cluster()
    for name in ("a", "b"):
        made.put(KIND, name, 1)
        made.put("Deployment", f"{name}-1", 1, owner=name)
        made.put("Pod", f"{name}-1-x", 1, service=name)
    return made, Resync(made, (), Owners())


def test_everything_is_queued_once_and_then_only_what_changed() -> None:
    made, resync = cluster()
    assert resync.changed() == {A, B}
    assert resync.changed() == set()
    made.put("Pod", "a-1-x", 2, service="a")
    assert resync.changed() == {A}
    made.put(KIND, "b", 2)
    assert resync.changed() == {B}
    assert resync.changed() == set()


def test_a_child_that_came_or_went_is_a_change() -> None:
    made, resync = cluster()
    resync.changed()
    del made.objects["Deployment", "a-1"]
    assert resync.changed() == {A}
    made.put("ConfigMap", "b-2", 1, owner="b")
    assert resync.changed() == {B}
    assert resync.changed() == set()


def test_a_service_that_came_or_went_is_a_change_and_foreign_objects_are_not() -> None:
    made, resync = cluster()
    resync.changed()
    del made.objects[KIND, "a"]
    made.put(KIND, "c", 1)
    assert resync.changed() == {A, Key("team", "c")}
    made.put("Pod", "someone-else", 1, service="nobody")
    assert resync.changed() == set()


def test_what_an_event_reported_is_not_queued() -> None:
    made, resync = cluster()
    resync.changed()
    made.put("Pod", "a-1-x", 2, service="a")
    resync.observe_event(A, made.objects["Pod", "a-1-x"], gone=False)
    resync.observe_event(A, made.objects.pop(("Deployment", "a-1")), gone=True)
    assert resync.changed() == set()
    for at in [at for at, meta in made.objects.items() if "b" in meta["name"]]:
        resync.observe_event(B, made.objects.pop(at), gone=True)
    assert resync.changed() == set()
    made.put("Pod", "a-1-x", 3, service="a")
    assert resync.changed() == {A}


def test_what_no_event_reports_until_the_next_resync_was_missed() -> None:
    """F09: a resync counts what no event reported since the last one."""
    made, resync = cluster()
    resync.changed()
    for meta in made.objects.values():
        resync.observe_event(A if "a" in meta["name"] else B, meta, gone=False)
    made.put("Pod", "a-1-x", 2, service="a")
    made.put("Pod", "b-1-x", 2, service="b")
    assert resync.changed() == {A, B} and resync.missed == 0
    resync.observe_event(A, made.objects["Pod", "a-1-x"], gone=False)  # late, but not missed
    assert resync.changed() == set() and resync.missed == 1
    assert resync.changed() == set() and resync.missed == 0


def test_an_event_during_a_resync_is_newer_than_its_list() -> None:
    made, resync = cluster()
    resync.changed()
    newer = {**made.objects["Pod", "a-1-x"], "resourceVersion": "3"}
    listed = made.metadata

    def meanwhile(kind: str, namespaces: tuple[str, ...], selector: str = "") -> Any:
        yield from listed(kind, namespaces, selector)
        if kind == "Pod":
            resync.observe_event(A, newer, gone=False)

    made.metadata = meanwhile  # type: ignore[method-assign]
    assert resync.changed() == set()
    made.metadata = listed  # type: ignore[method-assign]
    made.objects["Pod", "a-1-x"] = newer
    assert resync.changed() == set() and resync.missed == 0


def test_a_child_s_event_before_its_service_is_known_is_not_missed() -> None:
    made, resync = cluster()
    for meta in made.objects.values():
        resync.observe_event(None, meta, gone=False)
    assert resync.changed() == set()
    assert resync.changed() == set() and resync.missed == 0


def test_what_a_deleted_service_leaves_behind_was_not_missed() -> None:
    made, resync = cluster()
    resync.changed()
    resync.observe_event(A, made.objects.pop((KIND, "a")), gone=True)
    assert resync.changed() == {A}
    assert resync.changed() == set() and resync.missed == 0


def test_foreign_objects_with_our_labels_are_not_queued() -> None:
    made, resync = cluster()
    resync.changed()
    made.put("Pod", "stranger", 1, service="nobody")
    resync.observe_event(None, made.objects["Pod", "stranger"], gone=False)
    assert resync.changed() == set()
    resync.observe_event(None, made.objects.pop(("Pod", "stranger")), gone=True)
    assert resync.changed() == set() and resync.missed == 0


class Before(Cluster):
    """With the kind's earlier group: its services, or the error of listing them."""

    answer: int | Exception = Missing("no such group")

    def metadata(
        self, kind: str, namespaces: tuple[str, ...], selector: str = ""
    ) -> Iterator[dict[str, Any]]:
        if kind != EARLIER_KIND:
            return super().metadata(kind, namespaces, selector)
        if isinstance(self.answer, Exception):
            raise self.answer
        return iter([{}] * self.answer)


def test_services_of_the_earlier_group_are_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = Before()
    resync = Resync(made, (), Owners())
    counts: list[tuple[int | Exception, int]] = [(Missing(""), 0), (2, 2), (2, 2), (1, 1), (0, 0)]
    for made.answer, services in counts:
        resync.changed()
        assert resync.earlier.services == services
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert [line.split(",")[0] for line in lines] == [
        "2 of inferenceservices.kvline.dev exist",
        "1 of inferenceservices.kvline.dev exist",
    ]


@pytest.mark.parametrize("error", [Forbidden("HTTP 403"), ApiUnavailable("HTTP 500")])
def test_an_earlier_group_that_cannot_be_listed_does_not_end_resyncs(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """The role is not this version's, or the group's conversion webhook has gone."""
    made = Before()
    made.put(KIND, "a", 1)
    made.answer = error
    resync = Resync(made, (), Owners())
    assert resync.changed() == {A}
    resync.changed()
    (line,) = caplog.messages
    assert "whether kvline.dev has services is unknown" in line
