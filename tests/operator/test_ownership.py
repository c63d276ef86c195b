"""Whose object this is: by UID, and of an orphan by its content. Labels and names can be forged."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvline_contract.launch import GateFile
from kvline_contract.names import FIELD_MANAGER
from kvline_operator.api.spec import parse
from kvline_operator.observe.ownership import Service, Whose, whose
from kvline_operator.plan import jobs, render
from kvline_operator.plan.revisions import wanted
from kvline_operator.settings import Settings

EARLIER = json.loads((Path(__file__).parent / "earlier" / "revisions.json").read_text())
SETTINGS = Settings("registry.example/server:1")
SERVICE = Service("chat", "u2", "chat")
Object = dict[str, Any]


def orphan(body: Object) -> Object:
    """As `kubectl delete --cascade=orphan` leaves it."""
    kept = {k: v for k, v in body["metadata"].items() if k != "ownerReferences"}
    return {**body, "metadata": {**kept, "managedFields": [{"manager": FIELD_MANAGER}]}}


def revision(**spec: Any) -> tuple[Object, list[Object]]:
    """A ControllerRevision and the objects of the revision, as rendered for a deleted service."""
    base = {"model": {"source": "pvc://models/tiny"}, "resources": {"memory": "2Gi"}}
    meta = {"name": "chat", "namespace": "ns", "uid": "u1"}
    made = parse({"metadata": meta, "spec": {**base, **spec}})
    new = wanted(made, [], SETTINGS.image_for(made.gpus))
    stored = render.controller_revision(made, new, SETTINGS)
    gate = GateFile(version=1, open=True)
    objects = [jobs.job(made, stored), *render.revision_objects(made, stored, 1, gate, "{}")]
    return orphan(stored), [orphan(o) for o in objects]


HUB = {"source": "hf://org/name@" + "0" * 40, "tokenSecretRef": {"name": "hub", "key": "token"}}
CACHED = {**HUB, "cache": {"claimName": "models"}}
KEY = {"apiKeySecretRef": {"name": "keys", "key": "key"}, "tlsSecretRef": {"name": "tls"}}


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"model": HUB},
        {"model": CACHED},
        {"access": KEY},
        {"resources": {"memory": "2Gi", "gpus": 1}},
    ],
)
def test_orphans_of_every_kind_of_spec_are_the_service_s_again(spec: Any) -> None:
    left, objects = revision(image="registry.example/server:2", **spec)
    assert SERVICE.revisions([left]) == [left]
    kept = SERVICE.of_revisions(objects, [left])
    assert [o["metadata"]["name"] for o in kept] == [o["metadata"]["name"] for o in objects]


@pytest.mark.parametrize("item", EARLIER, ids=lambda item: item["stored"]["metadata"]["name"])
def test_orphans_of_earlier_operators_are_too(item: Object) -> None:
    left = orphan(item["stored"])
    base = left["metadata"]["labels"]["kvline.dev/service"]
    assert Service(base, "u2", base).revisions([left]) == [left]


def container(body: Object) -> Object:
    found: Object = body["data"]["podTemplate"]["spec"]["containers"][0]
    return found


FORGERIES: dict[str, Callable[[Object], Any]] = {
    "inputs": lambda b: b["data"]["inputs"]["resources"].update(memory="64Gi"),
    "image": lambda b: b["data"].update(image="evil:1"),
    "image of its template": lambda b: container(b).update(image="evil:1"),
    "name": lambda b: b["metadata"].update(name="chat-bbbbb"),
    "label": lambda b: b["metadata"]["labels"].update({"kvline.dev/revision": "bbbbb"}),
    "privileged": lambda b: container(b)["securityContext"].update(privileged=True),
    "escalation": lambda b: container(b)["securityContext"].pop("allowPrivilegeEscalation"),
    "host": lambda b: b["data"]["podTemplate"]["spec"].update(hostNetwork=True),
    "account": lambda b: b["data"]["podTemplate"]["spec"].update(serviceAccountName="admin"),
    "token": lambda b: b["data"]["podTemplate"]["spec"].pop("automountServiceAccountToken"),
    "root": lambda b: b["data"]["podTemplate"]["spec"].pop("securityContext"),
    "node's files": lambda b: b["data"]["podTemplate"]["spec"]["volumes"].append(
        {"name": "x", "hostPath": {"path": "/"}}
    ),
    "secret": lambda b: b["data"]["podTemplate"]["spec"]["volumes"].append(
        {"name": "x", "secret": {"secretName": "theirs"}}
    ),
    "secret variable": lambda b: container(b)["env"].append(
        {"name": "X", "valueFrom": {"secretKeyRef": {"name": "theirs", "key": "x"}}}
    ),
    "all variables": lambda b: container(b).update(envFrom=[{"secretRef": {"name": "theirs"}}]),
    "claim": lambda b: b["data"]["podTemplate"]["spec"]["volumes"].append(
        {"name": "x", "persistentVolumeClaim": {"claimName": "theirs"}}
    ),
    "volume of two kinds": lambda b: b["data"]["podTemplate"]["spec"]["volumes"].append(
        {"name": "x", "emptyDir": {}, "hostPath": {"path": "/"}}
    ),
    "another shape": lambda b: b["data"].update(podTemplate={"spec": ["x"]}),
    "no template": lambda b: b["data"].pop("podTemplate"),
    "no data": lambda b: b.pop("data"),
    "not written by us": lambda b: b["metadata"].update(managedFields=[{"manager": "kubectl"}]),
    "being deleted": lambda b: b["metadata"].update(deletionTimestamp="now"),
    "another's": lambda b: b["metadata"].update(
        ownerReferences=[{"uid": "u9", "name": "other", "controller": True}]
    ),
}


@pytest.mark.parametrize("how", FORGERIES)
def test_a_forged_revision_is_nobody_s(how: str) -> None:
    forged = copy.deepcopy(revision()[0])
    FORGERIES[how](forged)
    assert SERVICE.revisions([forged]) == []


def test_a_forged_child_of_a_known_revision_is_nobody_s() -> None:
    left, objects = revision()
    for change in ("template", "name", "revision"):
        forged = copy.deepcopy(objects[-1])
        if change == "template":
            forged["spec"]["template"]["spec"]["containers"][0]["image"] = "evil:1"
        elif change == "name":
            forged["metadata"]["name"] = "chat-other"
        else:
            forged["metadata"]["labels"]["kvline.dev/revision"] = "bbbbb"
        assert SERVICE.of_revisions([forged], [left]) == []


def test_whose_an_object_is() -> None:
    ours, owner = {"manager": FIELD_MANAGER}, {"name": "chat", "uid": "u2"}

    def item(*references: Object, by: Object = ours) -> Object:
        return {"metadata": {"ownerReferences": list(references), "managedFields": [by]}}

    def reference(name: str, uid: str) -> Object:
        return {"name": name, "uid": uid, "controller": True}

    assert whose(item(reference("chat", "u2")), owner) is Whose.OURS
    assert whose(item(reference("chat", "u1")), owner) is Whose.EARLIER
    assert whose(item(reference("talk", "u1")), owner) is Whose.FOREIGN
    assert whose(item(), owner) is Whose.ORPHAN
    assert whose(item(by={"manager": "kubectl"}), owner) is Whose.FOREIGN
