"""A day of somebody who has read the README alone: mistakes, a stuck rollout while a node is
drained, an evicted pod, an edit of what is not theirs, two operators, a long stream through a
rollout, and clients that retry for ever. Each ends by itself or by taking the mistake back, and
`kubectl describe` alone says what happened."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from support import describe, pods, wait
from test_main_job import RANDOM
from waiting import NotInTime, eventually, limit

from kvline_contract.names import LABEL_SERVICE, PRE_STOP_SECONDS, STATE_DIR
from kvline_operator.plan.podspec import DRAIN_SECONDS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

NODE = "local"
NOWHERE = "localhost/kvline-server@sha256:" + "0" * 64
CLIENT = str(Path(__file__).parent / "crowd.py")
WIDTH = {"maxModelLen": 8192, "maxPrefillTokens": 128, "maxRunningRequests": 2}
LONG = {
    **RANDOM,
    "engine": WIDTH,
    "capacity": {"kvTokens": 12288},
    "resources": {"cpu": "250m", "memory": "2Gi"},
    "drainSeconds": 3600,  # whatever else runs
}
# For the pod of the long stream alone. It has less than what it could take, so its pace stays,
# whatever else runs.
SLOW = {
    "apiVersion": "v1",
    "kind": "LimitRange",
    "metadata": {"name": "slow"},
    "spec": {"limits": [{"type": "Container", "default": {"cpu": "600m"}}]},
}
MOST = 8000  # tokens of the stream, which fit the context
PATIENCE = 600  # seconds, as all services start at once
STREAM = 240  # seconds: of the rollout, of the default drain, and to spare
DEFAULT_DRAIN = PRE_STOP_SECONDS + DRAIN_SECONDS  # from a pod's deletion to the end of streams
MODEL, MEMORY = RANDOM["model"], {"resources": {"memory": "2Gi"}}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a misspelt field": ({"replcas": 2}, "replcas"),
    "replicas in quotes": ({"replicas": "3"}, "spec.replicas"),
    "replicas below none": ({"replicas": -1}, "spec.replicas"),
    "a model by name alone": ({"model": {"source": "HuggingFaceTB/SmolLM2"}}, "spec.model.source"),
    "a branch for a commit": ({"model": {"source": "hf://a/b@main"}}, "spec.model.source"),
    "a path that climbs": ({"model": {"source": "pvc://models/../x"}}, "source"),
    "no memory": ({"resources": {"cpu": "1"}}, "memory"),
    "a unit that is none": ({"resources": {"memory": "2 Gi"}}, "memory"),
    "nine GPUs": ({"resources": {"memory": "2Gi", "gpus": 9}}, "spec.resources.gpus"),
    "a context of none": ({"engine": {"maxModelLen": 0}}, "spec.engine.maxModelLen"),
    "more wanted than pinned": ({"capacity": {"kvTokens": 100, "minKVTokens": 200}}, "minKVTokens"),
    "101 percent": ({"rollout": {"minCapacityPercent": 101}}, "minCapacityPercent"),
    "a strategy of another tool": ({"rollout": {"strategy": "BlueGreen"}}, "spec.rollout.strategy"),
    "fewer at most than at least": (
        {"autoscaling": {"minReplicas": 3, "maxReplicas": 2}},
        "minReplicas must not exceed maxReplicas",
    ),
    "the host's network": ({"hostNetwork": True}, "hostNetwork"),
}
# Taken by the API, and explained by the service: condition's reason, a word of describe.
EXPLAINED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no-claim": ({"model": {"source": "pvc://nowhere/x"}}, "ClaimMissing", "claim nowhere"),
    "no-image": ({"image": NOWHERE}, "ImagePullFailed", NOWHERE),
    "no-gpu": (
        {"resources": {"memory": "2Gi", "gpus": 1}, "image": NOWHERE},
        "Unschedulable",
        "nvidia.com/gpu",
    ),
    "no-folder": ({"model": {"source": "pvc://models/misspelt"}}, "NotFound", "misspelt"),
    "too-long": (
        {"engine": {"maxModelLen": 100_000}, "capacity": {"kvTokens": 100_000}},
        "SpecInvalid",
        "maxModelLen",
    ),
}


def described(space: Any, name: str) -> str:
    """What `kubectl describe` prints, on one line."""
    return " ".join(space.kubectl("describe", "kvl", name).stdout.split())


def explained(space: Any, name: str, *words: str, seconds: float = 300) -> None:
    """Until describe has all of the words."""
    try:
        eventually(lambda: all(word in described(space, name) for word in words), seconds, on="pod")
    except NotInTime as error:
        text = f"{name}: {words}: {error}\n{described(space, name)}\n{describe(space, name)}"
        raise NotInTime(text) from None


def address(space: Any, name: str) -> str:
    return str(space.get("service", name)["spec"]["clusterIP"])


def of(space: Any, name: str) -> list[dict[str, Any]]:
    """A service's pods that are no leftovers, and not being deleted."""
    ours = [p for p in pods(space) if p["metadata"]["labels"].get(LABEL_SERVICE) == name]
    return [p for p in ours if p["status"].get("phase") not in ("Failed", "Succeeded")]


def uids(space: Any, name: str) -> set[str]:
    return {p["metadata"]["uid"] for p in of(space, name)}


def ready(space: Any, name: str) -> int:
    return int(space.get("kvl", name)["status"].get("readyReplicas", 0))


def draining(space: Any, name: str) -> list[dict[str, Any]]:
    """Metadata of a service's pods that are being deleted."""
    metas = [p["metadata"] for p in space.list("pods")]
    ours = [m for m in metas if m.get("labels", {}).get(LABEL_SERVICE) == name]
    return [m for m in ours if "deletionTimestamp" in m]


def mistakes(space: Any) -> None:
    assert len(REFUSED) + len(EXPLAINED) == 20
    for name, (change, named) in REFUSED.items():
        done = space.apply("mistake", **{"model": MODEL, **MEMORY, **change}, check=False)
        assert done.returncode != 0 and named in done.stderr, f"{name}: {done.stderr}"
    assert space.get("kvl", "mistake") is None
    for name, (change, _, _) in EXPLAINED.items():
        space.apply(name, **{**RANDOM, **change})
    for name, (_, reason, word) in EXPLAINED.items():
        explained(space, name, reason, word)
        space.kubectl("delete", "kvl", name, "--wait=false")


def held_and_drained(space: Any, cluster: Any) -> None:
    """The candidate has no image; the drain takes it and the one that serves, and ends."""
    space.apply("held", **RANDOM)
    wait(space, "held", "UpToDate", PATIENCE, status="True")
    space.apply("held", **RANDOM, image=NOWHERE)
    explained(space, "held", "GateHeld", "ImagePullFailed", NOWHERE)
    assert space.condition("Ready", "held")["status"] == "True"
    words = ("--pod-selector=kvline.dev/service=held", "--delete-emptydir-data")
    try:
        done = cluster.kubectl("drain", NODE, *words, f"--timeout={limit(100):.0f}s", check=False)
    finally:
        cluster.kubectl("uncordon", NODE)
    assert done.returncode == 0, done.stderr
    wait(space, "held", "Ready", PATIENCE, status="True")
    explained(space, "held", "GateHeld")
    space.apply("held", **RANDOM)
    wait(space, "held", "UpToDate", PATIENCE, status="True")
    space.kubectl("delete", "kvl", "held")


def evicted(space: Any) -> None:
    """It fills its disk beyond the limit, and the kubelet ends it for good."""
    (victim,) = [p["metadata"] for p in of(space, "day")]
    code = (
        f"import os; f = open('{STATE_DIR}/fill', 'wb'); os.posix_fallocate(f.fileno(), 0, 5 << 30)"
    )
    space.kubectl("exec", victim["name"], "-c", "server", "--", "python3", "-c", code)
    eventually(lambda: victim["uid"] not in uids(space, "day"), 200, on="pod")
    explained(space, "day", "PodEnded", victim["name"], "victed")  # the kubelet's word, or ours
    eventually(lambda: ready(space, "day") == 1, PATIENCE, on="pod")
    wait(space, "day", "UpToDate", status="True")


def foreign_edit(space: Any) -> None:
    """`kubectl set env` on a child: it is taken out again, with who it was."""
    (child,) = [d for d in space.list("deployments") if d["metadata"]["name"].startswith("day")]
    name = child["metadata"]["name"]
    before = uids(space, "day")
    space.kubectl("set", "env", f"deployment/{name}", "MINE=1")

    def clean() -> bool:
        spec = space.get("deployment", name)["spec"]["template"]["spec"]
        return not any(e["name"] == "MINE" for e in spec["containers"][0].get("env", []))

    eventually(clean, 60)
    explained(space, "day", "ForeignChangeRemoved", "kubectl", seconds=30)
    wait(space, "day", "UpToDate", status="True")
    eventually(lambda: uids(space, "day") == before, 120, on="pod")


def two_operators(space: Any, cluster: Any) -> None:
    """One acts; when it is killed the other does, within the time that docs/operations.md says."""
    system = ("-n", "kvline-system")
    cluster.kubectl(*system, "scale", "deployment/kvline-operator", "--replicas=2")

    def holder() -> str:
        words = ("get", "leases", "-o", "jsonpath={.items[*].spec.holderIdentity}")
        return str(cluster.kubectl(*system, *words).stdout)

    def operators() -> list[str]:
        words = ("get", "pods", "-l", "app.kubernetes.io/name=kvline-operator", "-o", "name")
        return [str(n).rpartition("/")[2] for n in cluster.kubectl(*system, *words).stdout.split()]

    eventually(lambda: len(operators()) == 2, 60)
    first = eventually(holder, 30, on="pod")
    leader = next(name for name in operators() if name in first)
    cluster.kubectl(*system, "delete", "pod", leader, "--force", "--grace-period=0")
    eventually(lambda: holder() not in ("", first), 60, on="pod")
    shown = cluster.kubectl(*system, "describe", "leases").stdout
    assert holder() in shown and "Holder Identity" in shown
    space.kubectl("annotate", "kvl", "day", "touched=yes", "--overwrite")
    wait(space, "day", "UpToDate", status="True")
    cluster.kubectl(*system, "scale", "deployment/kvline-operator", "--replicas=1")


@contextmanager
def long_stream(space: Any, cluster: Any) -> Iterator[subprocess.Popen[str]]:
    """A client that reads one answer."""
    seconds = str(limit(STREAM))
    words = [sys.executable, CLIENT, "stream", address(space, "day"), "day", seconds, str(MOST)]
    command = cluster.network.command(words)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        assert "tokens" in client.stdout.readline()  # its pace is known, and it has begun
        yield client


def rollout(space: Any) -> float:
    """While the client reads; gives the time at which its pod was deleted, and began to drain."""
    wide = {**WIDTH, "maxRunningRequests": 3}
    space.apply("day", **{**LONG, "engine": wide})
    wait(space, "day", "UpToDate", status="False")
    explained(space, "day", "GatePassed", seconds=PATIENCE)
    wait(space, "day", "UpToDate", status="True", seconds=PATIENCE)
    (drained,) = draining(space, "day")
    ends = datetime.fromisoformat(drained["deletionTimestamp"]).timestamp()
    return float(ends - drained["deletionGracePeriodSeconds"])


def begin_slowly(space: Any) -> None:
    """Only the first pod of the service is slow."""
    space.kubectl("create", "-f", "-", input=json.dumps(SLOW))
    space.apply("day", **LONG)
    (pod,) = eventually(lambda: of(space, "day"), 60)
    assert pod["spec"]["containers"][0]["resources"]["limits"]["cpu"] == "600m"
    space.kubectl("delete", "limitrange", "slow")


def day(space: Any, cluster: Any, streaming: Event) -> None:
    """What befalls a service while a client reads one long answer of it."""
    wait(space, "day", "UpToDate", PATIENCE, status="True")
    with long_stream(space, cluster) as client:
        streaming.set()
        drained = rollout(space)
        two_operators(space, cluster)
        evicted(space)
        assert client.stdout is not None
        end = json.loads(client.stdout.readline())
    assert end["ended"] == "length" and end["at"] - drained > DEFAULT_DRAIN, end
    foreign_edit(space)


def retry_storm(space: Any, cluster: Any, streaming: Event, folder: Path) -> None:
    """200 clients on a replica of two places: one more replica a minute, never more at once, which
    goes when they have."""
    assert streaming.wait(limit(PATIENCE))
    engine = {"maxModelLen": 512, "maxPrefillTokens": 128, "maxRunningRequests": 2}
    scaling = {"maxReplicas": 3, "scaleDownDelaySeconds": 20}
    space.apply("storm", **{**RANDOM, "engine": engine}, autoscaling=scaling)
    wait(space, "storm", "UpToDate", PATIENCE, status="True")
    stop = folder / "calm"
    words = [sys.executable, CLIENT, "storm", address(space, "storm"), "storm", str(stop), "200"]
    command = cluster.network.command(words)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as crowd:
        assert crowd.stdout is not None
        began = time.monotonic()
        most = {"first minute": 1}

        def grown() -> bool:
            asked = space.get("kvl", "storm")["status"].get("desiredReplicas", 1)
            if time.monotonic() - began < 55:
                most["first minute"] = max(most["first minute"], asked)
            return bool(asked >= 2 and time.monotonic() - began > 55)

        try:
            eventually(grown, 150, on="pod")
            explained(space, "storm", "Scaled", "rejected requests that retry", seconds=30)
            eventually(lambda: ready(space, "storm") == 2, 300, on="pod")
        finally:
            stop.touch()
        answers = json.loads(crowd.stdout.read())
    assert most["first minute"] <= 2
    assert {"200", "429"} <= set(answers) <= {"200", "429", "TimeoutError"}, answers  # of 120 s
    eventually(
        lambda: space.get("kvl", "storm")["status"].get("desiredReplicas") == 1, 120, on="pod"
    )
    eventually(lambda: len(of(space, "storm")) == 1, 120, on="pod")
    wait(space, "storm", "UpToDate", PATIENCE, status="True")
    space.kubectl("delete", "kvl", "storm")


@pytest.mark.fault(
    "F17",
    shows="two operators in a cluster: one holds the Lease, and the other within 60 s of its kill",
)
@pytest.mark.fault(
    "L13",
    shows="one stream (not 10 users) goes on for more than 135 s in a pod that a rollout has "
    "deleted, on a full machine: whole",
)
@pytest.mark.fault(
    "F22",
    shows="a foreign variable in a child's template is taken out, and an event names who set it",
)
@pytest.mark.fault(
    "F35", shows="a drain of a held candidate and of the one replica that serves ends"
)
def test_a_stranger_s_day(space: Any, cluster: Any, tmp_path: Path) -> None:
    streaming = Event()

    def others() -> None:
        mistakes(space)
        held_and_drained(space, cluster)

    begin_slowly(space)
    with ThreadPoolExecutor(3) as pool:
        began = [
            pool.submit(day, space, cluster, streaming),
            pool.submit(others),
            pool.submit(retry_storm, space, cluster, streaming, tmp_path),
        ]
    wrong = [error for job in began if (error := job.exception())]
    if wrong:
        raise BaseExceptionGroup("of what befell the stranger", wrong)
