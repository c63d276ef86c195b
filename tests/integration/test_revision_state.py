"""A revision's state in its ControllerRevision, with a real API server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playground import Node, Operator, Space, serve
from rolling import Service, up_to_date

from kvline_contract.names import ANNOTATION_IMAGE, ANNOTATION_STATE, KIND, LABEL_SERVICE
from kvline_kubectl.cluster import connect
from kvline_operator.api.spec import parse
from kvline_operator.plan import render
from kvline_operator.store import revision_state

pytestmark = pytest.mark.integration
EARLIER = Path(__file__).parents[1] / "operator" / "earlier" / "states.json"


@pytest.mark.fault(
    "F72",
    shows="the annotations of an earlier operator become the document without a pod restart, those "
    "of others stay; a state of a newer operator is in Accepted and is not written over",
)
def test_what_an_earlier_operator_kept_is_read_once_and_becomes_the_document(
    space: Space, node: Node, operator: Operator, until: Callable[..., Any]
) -> None:
    """Its annotations go with the first write, which leaves them out; those of others stay."""
    serve(space, node)
    operator.stop()
    kube = connect(None, str(space.cluster.kubeconfig), space.name).kube
    body = kube.get(KIND, space.name, "chat")
    assert body is not None
    (stored,) = kube.select("ControllerRevision", space.name, f"{LABEL_SERVICE}=chat")
    name, pods = stored["metadata"]["name"], {p["metadata"]["uid"] for p in space.list("pods")}
    kept = json.loads(EARLIER.read_text())["first"]
    made = render.with_annotations(parse(body), stored, kept)
    kube.apply(made, over=stored, exact=True)
    space.kubectl("annotate", "controllerrevision", name, "team=a")

    def annotations() -> dict[str, str]:
        return dict((space.get("controllerrevision", name) or {})["metadata"]["annotations"])

    assert set(annotations()) == {*kept, "team"}
    operator.start()
    until(lambda: ANNOTATION_STATE in annotations())
    assert set(annotations()) == {ANNOTATION_IMAGE, ANNOTATION_STATE, "team"}
    found = revision_state.read({"metadata": {"annotations": annotations()}})
    assert (found.accepted, found.baseline) == (1, {"": 19376})
    assert {p["metadata"]["uid"] for p in space.list("pods")} == pods

    newer = '{"version":2,"shape":"unknown"}'
    space.kubectl(
        "annotate", "--overwrite", "controllerrevision", name, f"{ANNOTATION_STATE}={newer}"
    )
    until(lambda: space.condition("Accepted").get("reason") == "NewerState")
    assert name in space.condition("Accepted")["message"]
    assert space.condition("Ready")["status"] == "True"
    assert annotations()[ANNOTATION_STATE] == newer


@pytest.mark.fault(
    "F73",
    shows="UpToDate is True at once, and the revision is measured and takes over at 2 replicas",
)
def test_a_change_at_zero_replicas_is_measured_once_there_are_some(service: Service) -> None:
    """UpToDate is True until then, so nothing waits for a rollout that cannot begin."""
    first = service.stable()
    service.space.apply(replicas=0, engine={"maxModelLen": 2048})
    status = service.until_reason("ScaledToZero")
    assert up_to_date(status)["status"] == "True"
    candidate = status["rollout"]["candidateRevision"]
    assert status["rollout"]["stableRevision"] == first != candidate
    service.tokens[candidate] = 4096
    service.space.apply(replicas=2, engine={"maxModelLen": 2048})
    service.until(lambda s: s["rollout"]["stableRevision"] == candidate)
