"""What is done about an object that has a child's name and that no list has."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from kvline_contract.launch import GateFile
from kvline_contract.names import ANNOTATION_STATE, FIELD_MANAGER
from kvline_operator.api.spec import parse
from kvline_operator.apply.ensure import create_revision, ensure
from kvline_operator.errors import Conflict, Deleting, NameConflict
from kvline_operator.kube import Kube
from kvline_operator.plan import render
from kvline_operator.plan.revisions import wanted
from kvline_operator.settings import Settings
from kvline_operator.store.revision_state import RevisionState, to_annotations

Object = dict[str, Any]
IMAGE = "registry.example/server@sha256:" + "a" * 64
SPEC = parse(
    {
        "metadata": {"namespace": "ns", "name": "chat", "uid": "u1"},
        "spec": {"model": {"source": "pvc://m/tiny"}, "resources": {"memory": "2Gi"}},
    }
)
STORED = render.controller_revision(SPEC, wanted(SPEC, [], IMAGE), Settings(IMAGE))
NEW = render.with_annotations(SPEC, STORED, to_annotations(RevisionState()))


class Server(Kube):
    """An API server that has this one object."""

    def __init__(self, live: Object) -> None:
        self.live = live
        self.applied: list[Object] = []

    def get(self, kind: str, namespace: str, name: str) -> Object:
        return copy.deepcopy(self.live)

    def apply(
        self, body: Object, anew: bool = False, over: Object | None = None, exact: bool = False
    ) -> Object:
        if anew:
            raise Conflict("exists")
        self.applied.append(body)
        return {**body, "metadata": {**self.live["metadata"], **body["metadata"]}}

    def json_patch(self, kind: str, namespace: str, name: str, patch: list[Object]) -> Object:
        held, labels = patch
        assert held["value"] == self.live["metadata"]["resourceVersion"]
        assert labels["path"] == "/metadata/labels"
        self.live["metadata"]["labels"] = labels["value"]
        return self.live


def live(body: Object, **meta: Any) -> Object:
    made = copy.deepcopy(body)
    fields = [{"manager": FIELD_MANAGER, "operation": "Apply", "fieldsV1": {"f:spec": {}}}]
    made["metadata"] |= {"uid": "x", "resourceVersion": "7", "managedFields": fields, **meta}
    return made


def test_an_orphan_that_is_not_as_rendered_does_not_get_an_owner() -> None:
    """The list of what is as rendered lacks it. By admission nothing can be explained there: who
    forges the object forges its field manager too."""
    (*_, deployment) = render.revision_objects(SPEC, STORED, 1, GateFile(1, True), "{}")
    forged = live(deployment, ownerReferences=[])
    forged["spec"]["template"]["spec"]["serviceAccountName"] = "admin"
    server = Server(forged)
    with pytest.raises(NameConflict, match="Deployment chat-"):
        ensure(server, deployment, absent=True)
    assert not server.applied


def test_what_admission_kept_in_a_listed_orphan_restarts_no_pod() -> None:
    (*_, deployment) = render.revision_objects(SPEC, STORED, 1, GateFile(1, True), "{}")
    seen = live(deployment, ownerReferences=[])
    mirrored = IMAGE.replace("registry.example", "mirror.example")
    seen["spec"]["template"]["spec"]["containers"][0]["image"] = mirrored
    server = Server(seen)
    seen["metadata"]["managedFields"][0]["fieldsV1"] = {"f:spec": {"f:template": {}}}
    ensure(server, deployment, seen, absent=True)
    (written,) = server.applied
    assert written["spec"]["template"]["spec"]["containers"][0]["image"] == mirrored
    assert written["metadata"]["ownerReferences"]


@pytest.mark.parametrize("label", ["kvline.dev/service", "kvline.dev/revision"])
@pytest.mark.parametrize("owned", [True, False])
def test_a_revision_that_lost_a_label_gets_it_back_and_keeps_its_state(
    label: str, owned: bool
) -> None:
    state = to_annotations(RevisionState(accepted=3, baseline={"": 5000}))
    there = live(render.with_annotations(SPEC, STORED, state))
    there["metadata"]["labels"].pop(label)
    if not owned:
        del there["metadata"]["ownerReferences"]
    server = Server(there)
    for _ in range(2):  # it reconciles again until the list has it
        with pytest.raises(Conflict):
            create_revision(server, NEW)
    assert not server.applied
    assert server.live["metadata"]["labels"].items() >= STORED["metadata"]["labels"].items()
    kept = server.live["metadata"]["annotations"]
    assert kept[ANNOTATION_STATE] == state[ANNOTATION_STATE]


def test_another_revision_of_that_name_stays_as_it_is() -> None:
    foreign = live(NEW, ownerReferences=[], managedFields=[{"manager": "kubectl"}], labels={})
    other = live({**NEW, "data": {}}, ownerReferences=[], labels={})
    gone = live(NEW, deletionTimestamp="now", labels={})
    for there, error in ((foreign, NameConflict), (other, NameConflict), (gone, Deleting)):
        server = Server(there)
        with pytest.raises(error):
            create_revision(server, NEW)
        assert not server.applied and server.live["metadata"]["labels"] == {}
