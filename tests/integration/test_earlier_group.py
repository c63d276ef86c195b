"""Services of the kind's earlier group: the operator tells of them, and by the steps of
docs/operations.md they are moved without a restart."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import crd
import pytest
from playground import CHILDREN, Node, Operator, Space, manifest, serve
from waiting import limit

from kvline_contract.names import EARLIER_GROUP, GROUP, PLURAL

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]
EARLIER, NOW = f"{PLURAL}.{EARLIER_GROUP}", f"{PLURAL}.{GROUP}"


def upgraded(operator: Operator) -> None:
    """Ends it; the next one has another default image."""
    operator.stop()
    operator.words = ["--default-image", "localhost/kvline-server:newer"]


def children(space: Space) -> Iterator[tuple[str, dict[str, Any]]]:
    for kind in CHILDREN:
        for item in space.list(kind):
            if "kvline.dev/service" in (item["metadata"].get("labels") or {}):
                yield kind, item


def given_to(space: Space, owner: dict[str, Any]) -> None:
    """Makes `owner` the controller of all children, as the earlier operator wrote it."""
    for kind, item in children(space):
        name = item["metadata"]["name"]
        body = json.loads(space.kubectl("get", kind, name, "-o", "json").stdout)
        (reference,) = body["metadata"]["ownerReferences"]
        meta = {"name": name, "labels": body["metadata"]["labels"]}
        if kind == "controllerrevisions":
            meta["annotations"] = body["metadata"]["annotations"]
        body["metadata"] = {**meta, "ownerReferences": [{**reference, **owner}]}
        body.pop("status", None)
        words = ("apply", "--server-side", "--field-manager=kvline-operator", "--force-conflicts")
        space.kubectl(*words, "-f", "-", input=json.dumps(body))


def standing(space: Space, node: Node) -> tuple[set[str], str, set[str], list[Any]]:
    """What must not change: pods, the stable revision, children by UID, and what is stored of each
    revision."""
    pods = {p["metadata"]["uid"] for p in node.pods()}
    body = space.get(NOW, "chat")
    assert body is not None
    stable = str(body["status"]["rollout"]["stableRevision"])
    stored = [r["metadata"]["annotations"] for r in space.list("controllerrevisions")]
    return pods, stable, {item["metadata"]["uid"] for _, item in children(space)}, stored


def adopted(space: Space) -> bool:
    """Whether the service controls all children, and nothing else does."""
    body = space.get(NOW, "chat")
    assert body is not None
    wanted = [(body["apiVersion"], body["metadata"]["uid"])]
    found = [
        [(o["apiVersion"], o["uid"]) for o in item["metadata"].get("ownerReferences") or []]
        for _, item in children(space)
    ]
    return bool(found) and all(references == wanted for references in found)


def test_children_whose_owner_of_the_earlier_group_is_gone_are_adopted(
    space: Space, operator: Operator, node: Node, until: Callable[..., Any]
) -> None:
    """Where the earlier definition was deleted before its objects let their children go."""
    serve(space, node)
    before = standing(space, node)
    upgraded(operator)
    gone = {
        "apiVersion": f"{EARLIER_GROUP}/v1alpha1",
        "uid": "gone",
    }
    given_to(space, gone)
    space.kubectl("delete", NOW, "chat", "--cascade=orphan")
    space.apply()
    operator.start()
    until(lambda: space.up_to_date and adopted(space))
    assert standing(space, node) == before


@pytest.fixture
def earlier(space: Space, tmp_path: Path) -> Iterator[None]:
    """The kind's definition in its earlier group, beside today's."""
    file = tmp_path / "earlier.yaml"
    file.write_text(crd.FILE.read_text().replace(GROUP, EARLIER_GROUP))
    crd.define(space.cluster.kubectl, file)
    yield
    crd.undefine(space.cluster.kubectl, EARLIER)


@pytest.mark.usefixtures("earlier")
def test_a_service_is_moved_from_the_earlier_group_by_the_documented_steps(
    space: Space, operator: Operator, node: Node, until: Callable[..., Any]
) -> None:
    serve(space, node)
    before = standing(space, node)
    upgraded(operator)
    text = manifest().replace(f'"{GROUP}/', f'"{EARLIER_GROUP}/')
    space.kubectl("apply", "-f", "-", input=text)
    old = space.get(EARLIER, "chat")
    assert old is not None
    given_to(space, {"apiVersion": old["apiVersion"], "uid": old["metadata"]["uid"]})
    space.kubectl("delete", NOW, "chat", "--cascade=orphan")

    until(operator.start().is_well)
    until(lambda: operator.metric("kvline_earlier_group_services") == 1)
    notice = f"1 of {EARLIER} exist, which this version does not reconcile"
    assert notice in operator.log.read_text()
    for words in (("status",), ("status", "-A")):
        assert notice in space.kvline(*words).stderr
    missing = space.kvline("explain", "chat", check=False).stderr
    assert "no InferenceService chat" in missing and notice in missing

    space.kubectl("delete", EARLIER, "--all", "--cascade=orphan", f"--timeout={limit(60):.0f}s")
    crd.undefine(space.cluster.kubectl, EARLIER)
    space.apply()
    until(lambda: space.up_to_date and adopted(space))
    assert standing(space, node) == before
    assert space.kvline("status").stderr == ""
