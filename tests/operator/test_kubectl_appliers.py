"""Managers that set back what a verb of `kubectl kvline` writes."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvline_contract.names import CLI_FIELD_MANAGER
from kvline_kubectl.__main__ import parser, pause
from kvline_kubectl.appliers import warnings
from kvline_kubectl.cluster import Cluster

Object = dict[str, Any]
ENV: Object = {'k:{"name":"TZ"}': {".": {}, "f:name": {}, "f:value": {}}}
SPEC: Object = {
    "model": {"source": "pvc://models/tiny"},
    "resources": {"memory": "2048Mi"},
    "env": [{"name": "TZ", "value": "UTC"}],
    "rollout": {"paused": False},
    "restartedAt": "2026-01-01T00:00:00Z",
}
FIELDS: Object = {
    "f:model": {"f:source": {}},
    "f:resources": {"f:memory": {}},
    "f:env": ENV,
    "f:rollout": {".": {}, "f:paused": {}},
}
PAUSED: Object = {**SPEC, "rollout": {"paused": True}}


def applied(*entries: tuple[str, str], fields: Object = FIELDS, spec: Object = SPEC) -> Object:
    made = [
        {"manager": name, "operation": operation, "fieldsV1": {"f:spec": fields}}
        for name, operation in entries
    ]
    status = {"manager": "kvline-operator", "operation": "Update", "fieldsV1": {"f:status": {}}}
    meta: Object = {"name": "chat", "namespace": "ns", "uid": "u", "managedFields": [*made, status]}
    meta |= {"resourceVersion": "7", "generation": 3}
    return {"metadata": meta, "spec": copy.deepcopy(spec)}


@pytest.mark.parametrize(
    ("manager", "operation", "sets_back"),
    [
        ("kustomize-controller", "Apply", True),
        ("argocd-controller", "Apply", True),
        ("argocd-controller", "Update", True),
        ("helm", "Apply", True),
        ("helm", "Update", False),  # Helm 3 leaves what its manifests do not change
        ("kubectl-client-side-apply", "Update", True),
        ("kubectl-edit", "Update", False),
        (CLI_FIELD_MANAGER, "Update", False),
    ],
)
def test_a_manager_that_applies_the_field_is_named(
    manager: str, operation: str, sets_back: bool
) -> None:
    found = warnings(applied((manager, operation)), PAUSED)
    text = (
        f"{manager} applies spec.rollout.paused, and sets it back at its next apply: change it "
        f"where {manager} takes it from"
    )
    assert found == ([text] if sets_back else [])


def test_fields_that_nobody_applies_or_that_stay_as_they_are_warn_of_nothing() -> None:
    flux = ("kustomize-controller", "Apply")
    given = applied(flux)
    assert not warnings(given, {**SPEC, "restartedAt": "2026-02-02T00:00:00Z"})
    assert not warnings(given, {**SPEC, "resources": {"memory": "2Gi"}}), "the same quantity"
    bare = {key: value for key, value in SPEC.items() if key != "rollout"}
    kept = {key: value for key, value in FIELDS.items() if key != "f:rollout"}
    assert not warnings(applied(flux, fields=kept, spec=bare), PAUSED)
    empty = applied(flux, fields={"f:rollout": {}}, spec={**SPEC, "rollout": {}})
    assert not warnings(empty, PAUSED), "an applied map leaves fields of others"
    assert not warnings({"metadata": {}, "spec": SPEC}, PAUSED)


def test_of_a_rollback_all_fields_are_named_for_each_manager() -> None:
    given = applied(("kustomize-controller", "Apply"), ("helm", "Apply"))
    back = {"model": SPEC["model"], "resources": {"memory": "1Gi"}, "rollout": SPEC["rollout"]}
    first, second = warnings(given, back)
    assert first.startswith("helm applies spec.env and spec.resources.memory, and sets them back")
    assert second.startswith("kustomize-controller applies spec.env and spec.resources.memory, ")
    gone = {key: value for key, value in SPEC.items() if key != "rollout"}
    (text,) = warnings(applied(("helm", "Apply")), gone)
    assert text.startswith("helm applies spec.rollout.paused, ")


@pytest.mark.parametrize("form", ["table", "json"])
def test_a_verb_writes_and_names_who_sets_it_back(
    capsys: pytest.CaptureFixture[str], form: str
) -> None:
    written: list[Any] = []

    def patch(kind: str, namespace: str, name: str, asked: list[Object], manager: str) -> Object:
        written.append((asked[-1]["value"]["rollout"], manager))
        return {**given, "spec": asked[-1]["value"]}

    given = applied(("kustomize-controller", "Apply"))
    kube = SimpleNamespace(get=lambda *where: given, patch=patch)
    words = ["pause", "chat", "--timeout", "0", "-o", form]
    assert pause(Cluster(cast(Any, kube), "ns"), parser().parse_args(words)) == 0
    assert written == [({"paused": True}, CLI_FIELD_MANAGER)]
    shown, errors = capsys.readouterr()
    assert errors.startswith("kustomize-controller applies spec.rollout.paused, ")
    assert len(errors.splitlines()) == 1
    if form == "json":
        assert json.loads(shown)["warnings"] == [errors.strip()]
    else:
        assert shown == "the rollout of chat is paused\n"
