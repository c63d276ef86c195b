"""The operator's rights are those that it uses: none too many, none missing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playground import identity, serve

from kvline_contract.names import LABEL_SERVICE
from kvline_contract.report import State

pytestmark = pytest.mark.integration

DIGEST = "localhost/kvline-server@sha256:" + "a" * 64
Right = tuple[str, str, str]  # API group, resource or resource/subresource, verb


def granted() -> set[Right]:
    named = ("kvline-operator", "kvline-operator-lease")
    roles = [d for d in identity() if d["kind"] in ("ClusterRole", "Role")]
    return {
        (group, resource, verb)
        for role in roles
        if role["metadata"]["name"] in named
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def requests(log: Path) -> Iterator[dict[str, Any]]:
    """The requests of the operator's ServiceAccount in the API server's audit log."""
    for line in log.read_text().splitlines():
        yield json.loads(line)


def used(log: Path) -> set[Right]:
    found = set()
    for request in requests(log):
        about = request.get("objectRef")
        if about and "resource" in about:  # discovery names no resource
            resource = about["resource"]
            if about.get("subresource"):
                resource += f"/{about['subresource']}"
            verbs = {request["verb"]}
            if request["verb"] == "patch" and request["responseStatus"]["code"] == 201:
                verbs.add("create")  # an apply that creates needs both rights
            found |= {(about.get("apiGroup", ""), resource, verb) for verb in verbs}
    return found


def test_every_right_that_is_granted_is_used_and_no_other_is_asked_for(
    space: Any, operator: Any, node: Any, until: Callable[..., Any], cluster: Any
) -> None:
    serve(space, node)
    space.apply(autoscaling={"minReplicas": 2, "maxReplicas": 2})
    until(lambda: space.get("kvl", "chat")["spec"]["replicas"] == 2)
    space.apply(replicas=1)
    for length in range(512, 512 + 12):  # more revisions than are kept
        space.apply(engine={"maxModelLen": length})
        generation = space.get("kvl", "chat")["metadata"]["generation"]
        until(lambda g=generation: space.get("kvl", "chat")["status"]["observedGeneration"] == g)
    # Measured, let through its gate, ready: a reconcile each.
    until(lambda: node.play(State.VALIDATED) or len(space.list("deployments")) == 1)
    until(lambda: len(space.list("controllerrevisions")) == 10)
    space.kubectl("patch", "service", "chat", "--type=merge", "-p", '{"spec":{"selector":null}}')
    until(lambda: space.get("service", "chat")["spec"].get("selector"))
    (deployment,) = (d["metadata"]["name"] for d in space.list("deployments"))
    for kind in (
        "deployment",
        "configmap",
        "controllerrevision",
    ):  # an object that is in no list is read by name
        space.kubectl("label", kind, deployment, f"{LABEL_SERVICE}-")
        until(lambda kind=kind: LABEL_SERVICE in space.get(kind, deployment)["metadata"]["labels"])

    space.kubectl("scale", "kvl", "chat", "--replicas=12")
    until(lambda: len(node.pods()) == 12)
    for pod in node.pods():
        node.end(pod, "Evicted", "the node was low on memory")
    until(lambda: [p["status"].get("reason") for p in space.list("pods")].count("Evicted") == 10)

    # A prepare Job, and one that is no longer needed.
    spec = (space.get("kvl", "chat") or {})["spec"]
    space.apply(engine={"maxModelLen": 700}, rollout={"strategy": "Recreate"})
    until(lambda: space.list("jobs"))
    space.apply(engine=spec["engine"])
    until(lambda: not space.list("jobs"))

    # The template of a GPU's claims, which is in no list once and is then no longer needed.
    gpu = {"memory": "2Gi", "gpus": 1, "gpuDeviceClass": "gpu.nvidia.com"}
    space.apply(engine=spec["engine"], image=DIGEST, resources=gpu)
    (template,) = until(lambda: space.list("resourceclaimtemplates"))
    name = template["metadata"]["name"]
    space.kubectl("label", "resourceclaimtemplate", name, f"{LABEL_SERVICE}-")
    space.kubectl("annotate", "kvl", "chat", "wake=1")  # no watch would tell
    until(lambda: LABEL_SERVICE in space.get("resourceclaimtemplate", name)["metadata"]["labels"])
    space.apply(engine=spec["engine"])
    until(lambda: not space.list("resourceclaimtemplates"))

    log = cluster.audit_log
    refused = [
        (r["verb"], r["requestURI"])
        for r in requests(log)
        if r["annotations"].get("authorization.k8s.io/decision") == "forbid"
    ]
    assert refused == []
    assert used(log) - granted() == set()
    assert granted() - used(log) == set()
