"""The operator is uninstalled, installed and upgraded while services serve: no pod of theirs
restarts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import build
import crd
import earlier
import pytest
from playground import manifest
from support import install, pods, uninstall, wait
from test_main_job import RANDOM
from waiting import eventually, limit

from conftest import ROOT
from kvline_contract.names import EARLIER_GROUP, GROUP, PLURAL

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
EARLIER = f"{PLURAL}.{EARLIER_GROUP}"


def living(space: Any) -> dict[str, int]:
    """Restarts of each pod by UID."""
    return {
        p["metadata"]["uid"]: sum(c["restartCount"] for c in p["status"]["containerStatuses"])
        for p in pods(space)
    }


def answers(space: Any, cluster: Any, name: str) -> bool:
    ip = space.get("service", name)["spec"]["clusterIP"]
    body = json.dumps({"model": name, "prompt": "Hello", "max_tokens": 4})
    words = ["curl", "-sf", "-H", "Content-Type: application/json", "-d", body]
    done = cluster.network.run([*words, f"http://{ip}:8000/v1/completions"], check=False)
    return bool(done.returncode == 0 and json.loads(done.stdout)["usage"]["completion_tokens"] == 4)


def test_uninstalled_and_installed_again_beside_a_service(space: Any, cluster: Any) -> None:
    space.apply("steady", **RANDOM)
    wait(space, "steady", "UpToDate", status="True")
    before = living(space)
    try:
        uninstall(cluster)
        assert cluster.kubectl("-n", "kvline-system", "get", "deploy", "-o", "name").stdout == ""
        assert space.get("kvl", "steady")["status"]["capacity"]["kvTokens"] == 4096
        assert living(space) == before and answers(space, cluster, "steady")
    finally:
        install(cluster)
    generation = space.get("kvl", "steady")["metadata"]["generation"]
    space.apply("steady", **{**RANDOM, "replicas": 1, "rollout": {"minCapacityPercent": 90}})
    eventually(
        lambda: space.get("kvl", "steady")["status"]["observedGeneration"] > generation,
        60,
        on="pod",
    )
    wait(space, "steady", "UpToDate", status="True")
    assert living(space) == before


def rollout(space: Any) -> dict[str, Any]:
    return dict(space.get("kvl", "steady")["status"]["rollout"])


@pytest.fixture
def predecessor(cluster: Any, tmp_path: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """The tree of the previous operator, whose images it loads into the cluster. Its definition is
    of the kind's earlier group, and must not outlive a test that failed."""
    if not earlier.unpack(tmp_path):
        pytest.skip(f"this clone's history does not reach back to {earlier.COMMIT}")
    images = earlier.images(tmp_path)
    for name in images.values():
        build.load_as(cluster.images, name, name)
    yield tmp_path, images
    crd.undefine(cluster.kubectl, EARLIER)


def apply_tree(cluster: Any, tree: Path, manifest: str, images: dict[str, str]) -> None:
    """Applies the CRD and operator of a tree by kubectl."""
    definition = str(tree / "manifests" / "crd.yaml")
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", definition)
    text = (tree / "manifests" / manifest).read_text()
    for component, name in images.items():
        text = text.replace(f"localhost/kvline-{component}:dev", name)
    cluster.kubectl("apply", "-f", "-", input=text)
    rolled = ("rollout", "status", "deploy/kvline-operator", f"--timeout={limit(120):.0f}s")
    cluster.kubectl("-n", "kvline-system", *rolled)


def earlier_status(space: Any) -> dict[str, Any]:
    return dict((space.get(EARLIER, "steady") or {}).get("status") or {})


def is_up_to_date(status: dict[str, Any]) -> bool:
    found = [c["status"] for c in status.get("conditions", []) if c["type"] == "UpToDate"]
    return found == ["True"]


def test_from_the_operator_before_to_this_one(
    space: Any, cluster: Any, predecessor: tuple[Path, dict[str, str]]
) -> None:
    """F41: an operator upgrade restarts no pod of a service with two replicas, from the group
    kvline.dev by the steps of docs/operations.md; the new image comes with `upgrade`, through the
    gate."""
    now = {c: build.image_name(c) for c in build.COMPONENTS}
    tree, old = predecessor
    assert old["server"] != now["server"]
    uninstall(cluster)
    apply_tree(cluster, tree, "operator.yaml", old)
    steady = manifest("steady", **RANDOM, replicas=2)
    space.kubectl("apply", "-f", "-", input=steady.replace(f'"{GROUP}/', f'"{EARLIER_GROUP}/'))
    eventually(lambda: is_up_to_date(earlier_status(space)), 240, on="pod")
    before = living(space)
    first = earlier_status(space)["rollout"]["stableRevision"]

    space.kubectl("delete", EARLIER, "--all", "--cascade=orphan", f"--timeout={limit(60):.0f}s")
    crd.undefine(cluster.kubectl, EARLIER)
    apply_tree(cluster, ROOT, "install.yaml", now)
    space.kubectl("apply", "-f", "-", input=steady)
    eventually(lambda: "rollout" in ((space.get("kvl", "steady") or {}).get("status") or {}), 60)
    eventually(lambda: rollout(space).get("imageOutdated"), 60, on="pod")
    wait(space, "steady", "UpToDate", status="True")
    assert living(space) == before and answers(space, cluster, "steady")
    assert rollout(space)["stableRevision"] == first

    space.kvline("upgrade", "steady")
    eventually(lambda: rollout(space)["stableRevision"] != first, 240, on="pod")
    wait(space, "steady", "UpToDate", status="True")
    images = {p["spec"]["containers"][0]["image"] for p in pods(space)}
    assert images == {now["server"]}
    assert "GatePassed" in [e["reason"] for e in space.list("events")]
    space.kubectl("delete", "kvl", "steady", f"--timeout={limit(60):.0f}s")
    cluster.kubectl("delete", "-f", str(ROOT / "manifests" / "install.yaml"))
    cluster.kubectl("create", "namespace", "kvline-system")
    install(cluster)
