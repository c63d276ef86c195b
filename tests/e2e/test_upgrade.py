"""The operator is uninstalled, installed and upgraded while services serve: no pod of theirs
restarts."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
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
from kvline_contract.names import ANNOTATION_STATE, EARLIER_GROUP, GROUP, PLURAL

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
EARLIER = f"{PLURAL}.{EARLIER_GROUP}"
OPERATOR = "app.kubernetes.io/name=kvline-operator"
SENT, EVERY = 6, 1.0  # requests, and seconds from one to the next, which are no limit


def living(space: Any) -> dict[str, int]:
    """Restarts of each pod by UID."""
    return {
        p["metadata"]["uid"]: sum(c["restartCount"] for c in p["status"]["containerStatuses"])
        for p in pods(space)
    }


def address(space: Any, name: str) -> str:
    return str(space.get("service", name)["spec"]["clusterIP"])


def identity(space: Any) -> str:
    """Of the Service: one that is made again has another address."""
    return str(space.get("service", "steady")["metadata"]["uid"])


def refusal(space: Any, cluster: Any, name: str, ip: str) -> str:
    """What came in place of the answer to a request; empty where it was answered."""
    body = json.dumps({"model": name, "prompt": "Hello", "max_tokens": 4})
    words = ["curl", "-sS", "--fail-with-body", "-H", "Content-Type: application/json", "-d", body]
    done = cluster.network.run([*words, f"http://{ip}:8000/v1/completions"], check=False)
    if done.returncode == 0 and json.loads(done.stdout)["usage"]["completion_tokens"] == 4:
        return ""
    there = space.kubectl("get", "pods,endpointslices", check=False).stdout
    return f"curl ended with {done.returncode}: {done.stdout} {done.stderr}\n{there}"


def test_uninstalled_and_installed_again_beside_a_service(space: Any, cluster: Any) -> None:
    space.apply("steady", **RANDOM)
    wait(space, "steady", "UpToDate", status="True")
    before = living(space)
    try:
        uninstall(cluster)
        assert cluster.kubectl("-n", "kvline-system", "get", "deploy", "-o", "name").stdout == ""
        assert space.get("kvl", "steady")["status"]["capacity"]["kvTokens"] == 4096
        assert living(space) == before
        assert not refusal(space, cluster, "steady", address(space, "steady"))
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
    """The tree of the previous operator, whose images it loads into the cluster. Neither that
    operator nor its definition, of the kind's earlier group, outlives a test that failed: others
    need this version's."""
    if not earlier.unpack(tmp_path):
        pytest.skip(f"this clone's history does not reach back to {earlier.COMMIT}")
    images = earlier.images(tmp_path)
    for name in images.values():
        build.load_as(cluster.images, name, name)
    yield tmp_path, images
    crd.undefine(cluster.kubectl, EARLIER)
    made = str(ROOT / "manifests" / "install.yaml")
    cluster.kubectl("delete", "-f", made, "--ignore-not-found")
    cluster.kubectl("create", "namespace", "kvline-system")
    install(cluster)


def apply_tree(cluster: Any, tree: Path, images: dict[str, str]) -> None:
    """Applies the CRD and operator of a tree by kubectl."""
    definition = str(tree / "manifests" / "crd.yaml")
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", definition)
    text = (tree / "manifests" / "install.yaml").read_text()
    for component, name in images.items():
        text = text.replace(f"localhost/kvline-{component}:dev", name)
    cluster.kubectl("apply", "-f", "-", input=text)
    rolled = ("rollout", "status", "deploy/kvline-operator", f"--timeout={limit(120):.0f}s")
    cluster.kubectl("-n", "kvline-system", *rolled)


def stop(cluster: Any) -> None:
    """The operator, as docs/operations.md says."""
    system = ("-n", "kvline-system")
    cluster.kubectl(*system, "scale", "deploy/kvline-operator", "--replicas=0")
    gone = ("wait", "--for=delete", "pod", "-l", OPERATOR, f"--timeout={limit(60):.0f}s")
    cluster.kubectl(*system, *gone)


def earlier_status(space: Any) -> dict[str, Any]:
    return dict((space.get(EARLIER, "steady") or {}).get("status") or {})


def has_reason(space: Any, reason: str) -> bool:
    """Of UpToDate, of the service of the earlier group."""
    conditions = earlier_status(space).get("conditions", [])
    return reason in [c["reason"] for c in conditions if c["type"] == "UpToDate"]


def baselines(space: Any) -> list[str]:
    """Of each revision, in either form that an operator keeps it in."""
    kept = []
    for revision in space.list("controllerrevisions"):
        notes = revision["metadata"]["annotations"]
        state = json.loads(notes.get(ANNOTATION_STATE, "{}"))
        baseline = state.get("baseline") or json.loads(notes.get("kvline.dev/baseline", "{}"))
        kept.append(f"{revision['metadata']['name']}: {baseline}")
    return sorted(kept)


@contextmanager
def asked(space: Any, cluster: Any, name: str) -> Iterator[None]:
    """Sends a request each second meanwhile, SENT at least, to an address that stays; none may be
    lost."""
    ip = address(space, name)
    ended, got = threading.Event(), list[str]()

    def ask() -> None:
        while not ended.is_set() or len(got) < SENT:
            got.append(refusal(space, cluster, name, ip))
            ended.wait(EVERY)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield
    finally:
        ended.set()
        asking.join()
    assert not any(got), [text for text in got if text]


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
    apply_tree(cluster, tree, old)
    steady = manifest("steady", **RANDOM, replicas=2)
    smaller = manifest("steady", **{**RANDOM, "capacity": {"kvTokens": 1024}}, replicas=2)
    for text, reason in ((steady, "UpToDate"), (smaller, "RevisionRejected")):
        space.kubectl("apply", "-f", "-", input=text.replace(f'"{GROUP}/', f'"{EARLIER_GROUP}/'))
        eventually(partial(has_reason, space, reason), 240, on="pod")
    eventually(lambda: len(pods(space)) == 2, 60, on="pod")
    before, kept = living(space), baselines(space)
    was = earlier_status(space)["rollout"]
    first, service = was["stableRevision"], identity(space)

    with asked(space, cluster, "steady"):
        stop(cluster)  # or a reconcile under way might own an orphan again, which is collected then
        space.kubectl("delete", EARLIER, "--all", "--cascade=orphan", f"--timeout={limit(60):.0f}s")
        apply_tree(cluster, ROOT, now)
        space.kubectl("apply", "-f", "-", input=smaller)
        wait(space, "steady", "UpToDate", reason="RevisionRejected")
        crd.undefine(cluster.kubectl, EARLIER)
        eventually(lambda: rollout(space).get("imageOutdated"), 60, on="pod")
    assert living(space) == before and baselines(space) == kept and identity(space) == service
    assert rollout(space)["stableRevision"] == first
    assert rollout(space)["rejectedRevision"] == was["rejectedRevision"]
    assert rollout(space)["gate"]["message"] == was["gate"]["message"]
    space.kubectl("apply", "-f", "-", input=steady)
    wait(space, "steady", "UpToDate", status="True")
    assert living(space) == before

    space.kvline("upgrade", "steady")
    eventually(lambda: rollout(space)["stableRevision"] != first, 240, on="pod")
    wait(space, "steady", "UpToDate", status="True")
    images = {p["spec"]["containers"][0]["image"] for p in pods(space)}
    assert images == {now["server"]}
    assert "GatePassed" in [e["reason"] for e in space.list("events")]
    space.kubectl("delete", "kvl", "steady", f"--timeout={limit(60):.0f}s")
