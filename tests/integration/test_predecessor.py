"""An operator takes over from one whose contract wrote other launch files: no serving object is
rewritten, and all that may change still does."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from playground import Node, Operator, Space, serve
from rolling import Service

from kvline_contract.launch import GateFile

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


def found(space: Space, name: str) -> dict[str, Any]:
    live = space.get("configmap", name)
    assert live is not None
    return live


def replaced(space: Space, kind: str, body: dict[str, Any]) -> None:
    """The object made again with other immutable content, as its maker would have created it."""
    meta = body["metadata"]
    for key in ("resourceVersion", "uid", "creationTimestamp", "managedFields"):
        meta.pop(key, None)
    space.kubectl("delete", kind, meta["name"])
    # Server-side apply with the operator's own field manager.
    words = ("apply", "--server-side", "--field-manager=kvline-operator", "-f", "-")
    space.kubectl(*words, input=json.dumps(body))


def of_another_contract(space: Space, keeps_launch: bool) -> str:
    """Turns the only revision into one of an older operator, whose launch file has a key that
    today's has not, and lacks one that today's has. Returns the launch file."""
    (listed,) = space.list("controllerrevisions")
    revision = {"apiVersion": "apps/v1", "kind": "ControllerRevision", **listed}
    live = found(space, revision["metadata"]["name"])
    launch = json.loads(live["data"]["launch.json"])
    del launch["requireApiKey"]
    text = json.dumps({**launch, "fromBefore": 7}, separators=(",", ":"))
    assert text != live["data"]["launch.json"]
    revision["data"].pop("launch", None)
    if keeps_launch:
        revision["data"]["launch"] = text
    replaced(space, "controllerrevision", revision)
    replaced(space, "configmap", {**live, "data": {"launch.json": text}})
    return text


@pytest.mark.parametrize("keeps_launch", [False, True], ids=["kept-nowhere", "kept"])
def test_a_revision_of_another_contract_is_neither_rendered_anew_nor_stuck(
    space: Space,
    operator: Operator,
    node: Node,
    until: Callable[..., Any],
    keeps_launch: bool,
) -> None:
    """F41's core: the launch file is stored and not rendered again; an immutable ConfigMap would
    refuse the change with 422, and all writes for the service would stop."""
    serve(space, node)
    (uid,) = [p["metadata"]["uid"] for p in node.pods()]
    operator.stop()
    text = of_another_contract(space, keeps_launch)
    operator.start()
    space.apply(capacity={"minKVTokens": 100}, replicas=2)  # the gate file, and the replicas
    service = Service(space, node)
    service.tokens = {service.stable(): 4096}
    service.until(lambda s: s.get("readyReplicas") == 2)
    assert uid in [p["metadata"]["uid"] for p in node.pods()]
    assert space.condition("Accepted")["status"] == "True"
    name = f"chat-{service.stable()}"
    assert found(space, name)["data"]["launch.json"] == text
    gate = GateFile.parse(found(space, f"{name}-gate")["data"]["gate.json"])
    assert gate.min_kv_tokens == 100

    space.apply(replicas=2, engine={"maxModelLen": 512})  # and the next revision passes the gate
    candidate = service.candidate()
    service.tokens[candidate] = 4096
    service.until(lambda s: s["rollout"]["stableRevision"] == candidate)
    service.until_reason("UpToDate")
    reasons = [e["reason"] for e in space.list("events")]
    assert "SpecInvalid" not in reasons and "GatePassed" in reasons
    assert "HTTP 422" not in operator.log.read_text()


def test_a_launch_file_that_somebody_made_anew_is_put_back(
    space: Space, operator: Operator, node: Node, until: Callable[..., Any]
) -> None:
    """F22: an immutable launch file that somebody replaced cannot be changed back, so it is deleted
    and created again."""
    serve(space, node)
    (revision,) = space.list("controllerrevisions")
    name = revision["metadata"]["name"]
    operator.stop()  # or the operator may be faster
    replaced(space, "configmap", {**found(space, name), "data": {"launch.json": "{}"}})
    operator.start()
    wanted = {"launch.json": revision["data"]["launch"]}
    until(lambda: (space.get("configmap", name) or {}).get("data") == wanted)
