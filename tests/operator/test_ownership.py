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
from kvline_operator.api.revision_hash import revision_hash
from kvline_operator.api.spec import canonical, parse
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
PINNED = "registry.example/server@sha256:" + "a" * 64
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


def names_a_claim(body: Object) -> None:
    """Where the inputs have no claim; with the name that such a revision has."""
    data = body["data"]
    data["inputs"]["env"] = [{"name": "OMP_NUM_THREADS", "value": "theirs"}]
    volume = {"name": "x", "persistentVolumeClaim": {"claimName": "theirs"}}
    data["podTemplate"]["spec"]["volumes"].append(volume)
    name = revision_hash(canonical(data["inputs"]), data["image"])
    text = json.dumps(body).replace(body["metadata"]["labels"]["kvline.dev/revision"], name)
    body |= json.loads(text)


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
    "claim's name as a variable": names_a_claim,
    "command": lambda b: container(b).update(command=["sh"]),
    "argument": lambda b: container(b)["args"].append("--evil"),
    "other arguments": lambda b: container(b).update(args=["sh", "-c", "x"]),
    "plain variable": lambda b: container(b)["env"].append({"name": "LD_PRELOAD", "value": "x"}),
    "probe": lambda b: container(b)["livenessProbe"].update(exec={"command": ["sh"]}),
    "probe of another host": lambda b: container(b)["livenessProbe"]["httpGet"].update(host="x"),
    "hook": lambda b: container(b)["lifecycle"].update(postStart={"exec": {"command": ["sh"]}}),
    "ConfigMap": lambda b: b["data"]["podTemplate"]["spec"]["volumes"].append(
        {"name": "x", "configMap": {"name": "chat-other"}}
    ),
    "field of pods": lambda b: b["data"]["podTemplate"]["spec"].update(nodeName="node"),
    "download": lambda b: b["data"].update(download={**container(b), "image": "evil:1"}),
    "claim of another kind": lambda b: b["data"].update(
        claimTemplate={"kind": "RoleBinding", "apiVersion": "rbac.authorization.k8s.io/v1"}
    ),
    "launch file": lambda b: b["data"].update(
        launch=b["data"]["launch"].replace("pvc://models/tiny", "pvc://models/other")
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


def pod_of(item: Object) -> Object:
    found: Object = item["spec"]["template"]["spec"]
    return found


def first(item: Object) -> Object:
    found: Object = pod_of(item)["containers"][0]
    return found


CHILDREN: dict[str, Callable[[Object], Any]] = {
    "image": lambda d: first(d).update(image="evil:1"),
    "digest": lambda d: first(d).update(image="registry.example/server@sha256:" + "b" * 64),
    "account": lambda d: pod_of(d).update(serviceAccountName="admin"),
    "earlier account": lambda d: pod_of(d).update(serviceAccount="admin"),
    "root": lambda d: pod_of(d)["securityContext"].update(runAsNonRoot=False),
    "no context": lambda d: pod_of(d).pop("securityContext"),
    "token": lambda d: pod_of(d).pop("automountServiceAccountToken"),
    "capability": lambda d: first(d)["securityContext"]["capabilities"].update(drop=[]),
    "command": lambda d: first(d).update(command=["sh"]),
    "arguments": lambda d: first(d).update(args=["sh", "-c", "x"]),
    "variable": lambda d: first(d).setdefault("env", []).append({"name": "X", "value": "x"}),
    "probe": lambda d: first(d).update(livenessProbe={"exec": {"command": ["sh"]}}),
    "sidecar": lambda d: pod_of(d)["containers"].append({**first(d), "name": "spy"}),
    "volume": lambda d: pod_of(d)["volumes"].append({"name": "x", "hostPath": {"path": "/"}}),
    "host": lambda d: pod_of(d).update(hostNetwork=True),
    "name": lambda d: d["metadata"].update(name="chat-other"),
    "revision": lambda d: d["metadata"]["labels"].update({"kvline.dev/revision": "bbbbb"}),
    "another shape": lambda d: d["spec"]["template"].update(spec=["x"]),
}


@pytest.mark.parametrize("place", [0, -1], ids=["Job", "Deployment"])
@pytest.mark.parametrize("spec", [{}, {"model": HUB}, {"model": CACHED}], ids=["claim", "hub", "c"])
@pytest.mark.parametrize("how", CHILDREN)
def test_a_forged_child_of_a_known_revision_is_nobody_s(how: str, spec: Any, place: int) -> None:
    left, objects = revision(image=PINNED, **spec)
    forged = copy.deepcopy(objects[place])
    assert SERVICE.of_revisions([forged], [left]) == [forged]
    CHILDREN[how](forged)
    assert SERVICE.of_revisions([forged], [left]) == []


def test_an_orphan_has_defaults_and_what_webhooks_make_without_other_content() -> None:
    left, objects = revision(image=PINNED, resources={"memory": "2048Mi"})
    live = copy.deepcopy(objects[-1])
    first(live).update(image=PINNED.replace("registry.example", "mirror.example/x"))
    first(live).update(imagePullPolicy="Always")
    first(live)["resources"] = {"requests": {"memory": "2Gi"}, "limits": {"memory": "2Gi"}}
    pod_of(live).update(
        dnsPolicy="ClusterFirst",
        restartPolicy="Always",
        schedulerName="default-scheduler",
        serviceAccount=pod_of(live)["serviceAccountName"],
        terminationGracePeriodSeconds=300,
    )
    pod_of(live)["volumes"][0]["configMap"]["defaultMode"] = 420
    live["spec"]["template"]["metadata"] |= {"annotations": {"x": "y"}, "creationTimestamp": None}
    assert SERVICE.of_revisions([live], [left]) == [live]


def test_what_is_of_the_whole_service_is_its_own_with_an_orphaned_revision() -> None:
    """Recorded sizes and the autoscaler's state are read before they are first written."""
    left, _ = revision()
    owner = {"uid": "u2", "name": "chat", "controller": True}
    owned = {**left, "metadata": {**left["metadata"], "ownerReferences": [owner]}}
    for name in ("chat-records", "chat-scale"):
        item = orphan({"metadata": {"name": name, "labels": {"kvline.dev/service": "chat"}}})
        assert SERVICE.of_revisions([item], [left]) == [item]
        assert SERVICE.of_revisions([item], [owned]) == []
        assert SERVICE.of_revisions([item], []) == []


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
