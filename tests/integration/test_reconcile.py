"""The real operator with a real API server: the resulting objects and status, whatever happens."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from playground import CHILDREN, Operator, Space, children, serve
from proxy import Proxy
from waiting import eventually, limit, settles

from kvline_contract.report import State

pytestmark = pytest.mark.integration


TOKEN = r',?\s*\\*"tokenSHA256\\*":\s*\\*"[0-9a-f]{64}\\*"'


def shape(space: Any) -> str:
    """What two runs must agree in: names, labels, owners by name, specs and data."""
    made = {}
    for kind, items in children(space).items():
        for item in items:
            meta = item["metadata"]
            keep = {k: item.get(k) for k in ("spec", "data", "immutable") if k in item}
            text = json.dumps([meta["labels"], keep], sort_keys=True).replace(space.name, "NS")
            made[f"{kind}/{meta['name']}"] = re.sub(r'"clusterIPs?": (\[[^]]*\]|"[^"]*")', "", text)
    # Each operator has a token of its own for its notices, and one at rest writes none.
    return re.sub(TOKEN, "", json.dumps(made, sort_keys=True))


def revision(space: Any, name: str = "chat") -> str:
    status = (space.get("kvl", name) or {}).get("status") or {}
    return str((status.get("rollout") or {}).get("stableRevision", ""))


def test_an_apply_becomes_children_pods_and_a_validated_budget(
    space: Any, operator: Any, node: Any, until: Callable[..., Any]
) -> None:
    space.apply(capacity={"minKVTokens": 1000})
    until(node.pods)
    node.play(State.STRESSING)
    until(lambda: space.condition("Ready").get("reason") == "Stressing")
    node.play(State.VALIDATED, 4096)
    until(lambda: space.condition("Ready").get("status") == "True" and space.up_to_date)
    body = space.get("kvl", "chat")
    assert body["status"]["capacity"]["kvTokens"] == 4096
    assert body["status"]["capacity"]["fullLengthSequences"] == 4
    assert body["status"]["readyReplicas"] == 1
    assert "finalizers" not in body["metadata"]
    assert not [a for a in body["metadata"].get("annotations", {}) if "kopf" in a]
    assert {c["type"]: c["status"] for c in body["status"]["conditions"]}["UpToDate"] == "True"
    made = children(space)
    assert {k: len(v) for k, v in made.items()} == {**dict.fromkeys(CHILDREN, 1), "configmaps": 3}
    for items in made.values():
        for item in items:
            owner = item["metadata"]["ownerReferences"][0]
            assert (owner["uid"], owner["controller"]) == (body["metadata"]["uid"], True)
    reasons = {
        e["reason"]
        for e in space.list("events")
        if e["source"].get("component") == "kvline-operator"
    }
    assert {"CapacityValidated", "Serving"} <= reasons
    row = space.kubectl("get", "kvl").stdout.splitlines()
    assert row[0].split() == [
        "NAME",
        "MODEL",
        "READY",
        "UPTODATE",
        "REASON",
        "KV-TOKENS",
        "REVISION",
        "AGE",
    ]
    assert row[1].split()[:6] == ["chat", "chat", "1/1", "True", "Serving", "4096"]


def test_a_gpu_is_asked_of_the_node_and_its_image_must_be_named(
    space: Any, operator: Any, until: Callable[..., Any]
) -> None:
    """This operator has no default CUDA image."""
    asked = {"memory": "2Gi", "gpus": 1}
    space.apply(resources=asked)
    refused = until(lambda: space.condition("Accepted").get("status") == "False" and space)
    accepted = refused.condition("Accepted")
    assert accepted["reason"] == "SpecInvalid"
    assert "spec.image is required" in accepted["message"]
    assert not space.list("deployments")
    space.apply(resources=asked, image="registry.example/kvline-cuda@sha256:" + "a" * 64)
    (deployment,) = until(lambda: space.list("deployments"))
    (server,) = deployment["spec"]["template"]["spec"]["containers"]
    assert server["resources"]["limits"] == {"memory": "2Gi", "nvidia.com/gpu": "1"}
    assert server["resources"]["requests"]["nvidia.com/gpu"] == "1"
    launch = next(c for c in space.list("configmaps") if "launch.json" in c["data"])
    assert json.loads(launch["data"]["launch.json"])["device"] == "cuda"


@pytest.mark.parametrize("resync", [2])
def test_nothing_changed_means_zero_writes(
    space: Any, behind: Operator, proxy: Proxy, node: Any, until: Callable[..., Any]
) -> None:
    """Invariant 6: no object's resourceVersion changes while nothing happens, resync included."""
    serve(space, node)
    settles(behind.writes_nothing)

    def versions() -> dict[str, str]:
        items = [i for v in children(space).values() for i in v] + [space.get("kvl", "chat")]
        return {i["metadata"]["uid"]: i["metadata"]["resourceVersion"] for i in items}

    def unchanged() -> bool:
        before = versions()
        proxy.await_resync()
        return versions() == before

    until(unchanged)  # Kubernetes' own controllers have written what they had to
    written = behind.writes
    assert all(unchanged() for _ in range(3)) and behind.writes_nothing()
    assert behind.writes == written


def test_too_few_tokens_are_refused_with_both_figures(
    space: Any, operator: Any, node: Any, until: Callable[..., Any]
) -> None:
    space.apply(capacity={"minKVTokens": 5000})
    until(node.pods)
    node.play(State.VALIDATED, 4096, ready=False)
    until(lambda: space.condition("Ready").get("reason") == "BelowMinimum")
    shown = space.kubectl("describe", "kvl", "chat").stdout
    assert "4096 KV tokens, 5000 are required (spec.capacity.minKVTokens): 904 short" in shown
    assert "capacity" not in space.get("kvl", "chat")["status"]


def test_a_change_replaces_the_revision_replica_by_replica(
    space: Any, operator: Any, node: Any, until: Callable[..., Any]
) -> None:
    serve(space, node)
    old = revision(space)
    space.apply(engine={"maxModelLen": 2048})
    until(lambda: len(node.pods()) == 2)
    # Held as soon as the scheduler has reported that this control plane has no node.
    until(lambda: space.condition("UpToDate").get("reason") in ("RollingOut", "GateHeld"))
    assert space.condition("Ready")["status"] == "True"
    until(
        lambda: (
            node.play(State.VALIDATED, 8192)
            or (revision(space) != old and space.condition("UpToDate")["status"] == "True")
        )
    )
    until(lambda: len(node.pods()) == 1)
    alone = [f"chat-{revision(space)}"]  # the old Deployment goes once it has no pod any more
    until(lambda: [d["metadata"]["name"] for d in space.list("deployments")] == alone)
    assert len(space.list("controllerrevisions")) == 2
    assert until(
        lambda: (space.get("kvl", "chat")["status"].get("capacity") or {}).get("kvTokens") == 8192
    )


def test_a_spec_that_never_gets_ready_leaves_the_old_one_serving_and_can_be_taken_back(
    space: Any, operator: Any, node: Any, until: Callable[..., Any]
) -> None:
    """F36's core, F37."""
    serve(space, node)
    good, before = revision(space), shape(space)
    space.apply(model={"source": "pvc://models/broken"})
    until(lambda: len(node.pods()) == 2)
    until(lambda: space.condition("UpToDate").get("status") == "False")
    assert space.condition("Ready")["status"] == "True"
    space.apply()
    until(lambda: space.up_to_date)
    assert revision(space) == good
    until(lambda: len(node.pods()) == 1)

    def as_before() -> bool:
        now = json.loads(shape(space))
        kept = {k: v for k, v in now.items() if good in k or "revision" not in k}
        return bool(kept == json.loads(before))

    until(as_before)  # the other revision's objects go after its pods


def test_a_b_a_within_a_second_ends_at_a(
    space: Any, operator: Any, node: Any, until: Callable[..., Any]
) -> None:
    """C17."""
    space.apply()
    space.apply(engine={"maxModelLen": 2048})
    space.apply()
    generation = space.get("kvl", "chat")["metadata"]["generation"]
    until(
        lambda: (
            (space.get("kvl", "chat").get("status") or {}).get("observedGeneration") == generation
        )
    )
    until(lambda: len(space.list("deployments")) == 1)
    launch = space.get("configmap", space.list("deployments")[0]["metadata"]["name"])
    assert "maxModelLen" not in launch["data"]["launch.json"]


def test_a_forged_status_is_rewritten(
    space: Any, operator: Any, node: Any, until: Callable[..., Any]
) -> None:
    """C24."""
    serve(space, node)
    forged = {
        "status": {
            "capacity": {"kvTokens": 10**9},
            "readyReplicas": 77,
            "conditions": [
                {
                    "type": "Evil",
                    "status": "True",
                    "reason": "X",
                    "lastTransitionTime": "2026-01-01T00:00:00Z",
                }
            ],
        }
    }
    space.kubectl(
        "patch", "kvl", "chat", "--subresource=status", "--type=merge", "-p", json.dumps(forged)
    )

    def honest() -> bool:
        status = space.get("kvl", "chat")["status"]
        types = {c["type"] for c in status["conditions"]}
        return (
            status["readyReplicas"] == 1
            and "Evil" not in types
            and status["capacity"]["kvTokens"] == 4096
        )

    until(honest)


def test_two_long_names_have_children_of_their_own(
    space: Any, operator: Any, until: Callable[..., Any]
) -> None:
    """C04, C05."""
    one, other = "a" * 39 + "x", "a" * 39 + "y"
    refused = space.apply("a" * 60 + "." + "b" * 192, check=False)
    assert refused.returncode != 0 and "metadata.name" in refused.stderr
    space.apply(one)
    space.apply(other)
    until(lambda: len(space.list("deployments")) == 2)
    names = {d["metadata"]["name"] for d in space.list("deployments")}
    assert len(names) == 2 and {n.rpartition("-")[0] for n in names} == {one, other}
    assert all(len(n) <= 63 for n in names)


@pytest.mark.parametrize("raw", [b"<html>", b"{" + b" " * 10_000_000, b'{"version":9}'])
def test_a_broken_report_says_so_and_is_no_pass(
    space: Any, operator: Any, node: Any, until: Callable[..., Any], raw: bytes
) -> None:
    """F38 end to end."""
    space.apply()
    until(node.pods)
    node.play(State.VALIDATED, raw=raw, ready=False)
    until(lambda: space.condition("CapacityMeasured").get("reason") == "ReportInvalid")
    assert space.condition("Ready")["status"] == "False"


@pytest.mark.parametrize("resync", [2])
def test_a_figure_once_read_survives_an_unreadable_report(
    space: Any, behind: Operator, node: Any, until: Callable[..., Any]
) -> None:
    space.apply()
    until(node.pods)
    node.play(State.VALIDATED)
    until(lambda: space.condition("Ready").get("status") == "True")
    node.play(State.VALIDATED, raw=b"broken", ready=True)
    node.served.clear()

    def is_read() -> bool:
        behind.acts_once_more()
        return bool(node.served)

    until(is_read)  # what was read is kept for a resync's interval
    behind.acts_once_more()
    assert space.get("kvl", "chat")["status"]["capacity"]["kvTokens"] == 4096


@pytest.mark.fault(
    "F31",
    "F32",
    shows="the exit code and termination message of a pod played by the test become the "
    "condition, with one event; nothing is killed here",
)
def test_a_crash_is_explained_and_stands_through_the_restart(
    space: Any, operator: Any, node: Any, until: Callable[..., Any]
) -> None:
    """F31, F32's core: the termination message becomes the condition."""
    space.apply()
    pod = until(node.pods)[0]
    message = json.dumps(
        {"version": 1, "code": 40, "name": "OutOfMemory", "message": "tried 5 sizes"}
    )
    node.crash(pod, 40, message)
    until(lambda: space.condition("Ready").get("reason") == "OutOfMemory")
    assert space.condition("CapacityMeasured")["message"] == "tried 5 sizes"
    found = [e for e in space.list("events") if e["reason"] == "OutOfMemory"]
    assert len(found) == 1


@pytest.mark.timeout(600)
def test_killing_the_operator_at_each_of_its_writes_ends_in_the_same_state(
    cluster: Any, tmp_path: Path
) -> None:
    """F01: the operator is killed right after write k reached the API server, for every k."""

    def run(fault: str) -> tuple[str, bool]:
        space = Space(cluster, f"f01-{uuid.uuid4().hex[:8]}")
        cluster.kubectl("create", "namespace", space.name)
        operator = Operator(space, tmp_path / "log")
        try:
            return _ends(space, operator, fault)
        finally:
            operator.stop(signal.SIGKILL)
            cluster.kubectl("delete", "namespace", space.name, "--wait=false")

    undisturbed, _ = run("")
    assert run("1:before")[0] == undisturbed
    reached = 0
    for write in range(1, 40):
        made, died = run(f"{write}:after")
        assert made == undisturbed, write
        if not died:
            break
        reached = write
    assert reached >= 8, reached


def _ends(space: Space, operator: Operator, fault: str) -> tuple[str, bool]:
    """Applies a service; starts an operator that the fault kills, and again where it did. Returns
    the state once there is nothing more to write, and whether it was killed."""
    space.apply()
    operator.extra = {"KVLINE_FAULT_WRITE": fault} if fault else {}
    process = operator.start().process
    assert process is not None

    def is_over() -> bool:
        if process.poll() is not None and operator.extra:
            assert process.returncode == 9, "of something else than the fault"
            operator.extra = {}
            operator.start()
        # The last of its writes: the scheduler has found no node for the pod.
        return space.condition("Progressing").get("reason") == "Unschedulable"

    eventually(is_over, 60)
    if operator.extra:
        with suppress(subprocess.TimeoutExpired):
            process.wait(limit(0.5))  # after that very write
    assert len(space.list("deployments")) == 1
    return shape(space), process.poll() is not None
