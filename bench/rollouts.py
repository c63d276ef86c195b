"""Gated rollouts under streaming traffic, one after another, on a real node: requests that fail.

KVLINE_ROLLOUTS says how many; every second one would lose half of the budget and must be turned
down.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import build
import helm
import model
from local import LocalCluster
from playground import Space
from record import ROOT, record, table
from support import install, wait

MANY = int(os.environ.get("KVLINE_ROLLOUTS", "50"))
THREADS = 2
NAME = "soak"
SPEC = {
    "model": {"source": "pvc://models/smollm2", "loadFormat": "random"},
    "resources": {"cpu": "100m", "memory": "1536Mi"},
}
RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"


def spec(requests: int, tokens: int) -> dict[str, Any]:
    """Another number of running requests is another revision; half the tokens is a loss."""
    engine = {"maxModelLen": 512, "maxPrefillTokens": 128, "maxRunningRequests": requests}
    return {**SPEC, "engine": engine, "capacity": {"kvTokens": tokens}}


def up(cluster: LocalCluster) -> Space:
    model.ensure(print)
    helm.ensure(print)
    cluster.down()
    cluster.up(print)
    for image in build.build(print):
        cluster.images.add(image.name, image.config, image.layers)
    for name in ("kvline-system", "team"):
        cluster.kubectl("create", "namespace", name)
        cluster.kubectl("label", "namespace", name, RESTRICTED)
    install(cluster)
    cluster.claim("team", model.MODELS)
    return Space(cluster, "team")


def rollout(space: Space, number: int, requests: int) -> tuple[int, str]:
    """One change; gives the running requests of what serves after it, and the gate's result."""
    bad = number % 2 == 1
    wanted = 3 if requests == 4 else 4
    before = _status(space)["rollout"]["stableRevision"]
    space.apply(NAME, **spec(wanted, 2048 if bad else 4096))
    if bad:
        wait(space, NAME, "UpToDate", 300, reason="RolledBack")
    else:
        _until_other(space, before)
        wait(space, NAME, "UpToDate", 300, status="True")
    status = _status(space)
    changed = status["rollout"]["stableRevision"] != before
    if changed == bad or status["capacity"]["kvTokens"] < 4096:
        raise SystemExit(f"rollout {number}: {json.dumps(status['rollout'])}")
    return (requests if bad else wanted), str(status["rollout"]["gate"]["result"])


def _status(space: Space) -> dict[str, Any]:
    return dict((space.get("kvl", NAME) or {})["status"])


def _until_other(space: Space, revision: str) -> None:
    end = time.monotonic() + 300
    while _status(space)["rollout"]["stableRevision"] == revision:
        if time.monotonic() > end:
            raise SystemExit(f"revision {revision} still serves after 300 s")
        time.sleep(0.5)


def run() -> None:
    cluster = LocalCluster("bench")
    started = time.monotonic()
    results: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        stop = Path(folder) / "stop"
        try:
            space = up(cluster)
            space.apply(NAME, **spec(4, 4096))
            wait(space, NAME, "UpToDate", status="True")
            ip = (space.get("service", NAME) or {})["spec"]["clusterIP"]
            script = str(ROOT / "tests" / "e2e" / "traffic.py")
            words = [sys.executable, script, ip, NAME, str(stop), str(THREADS)]
            traffic = subprocess.Popen(
                cluster.network.command(words), stdout=subprocess.PIPE, text=True
            )
            started, requests = time.monotonic(), 4
            for number in range(MANY):
                requests, result = rollout(space, number, requests)
                results.append(result)
                print(f"  {number + 1}/{MANY}: {result}, {time.monotonic() - started:.0f} s")
            stop.touch()
            said = json.loads(traffic.communicate(timeout=120)[0])
        finally:
            stop.touch()
            cluster.down()
    tell(results, said, time.monotonic() - started)


def tell(results: list[str], said: dict[str, Any], seconds: float) -> None:
    failed = len(said["failures"])
    record(f"rollouts-{MANY}-failed-requests", failed, "requests", (failed, failed))
    for text in said["failures"][:5]:
        print(f"failed: {text}")
    row = [
        str(len(results)),
        str(results.count("Pass")),
        str(results.count("Fail")),
        f"{seconds:.0f}",
        str(len(said["ended"])),
        str(failed),
    ]
    head = ["rollouts", "passed", "turned down", "seconds", "streams", "failed (bar 0)"]
    table("Rollouts under streaming traffic", head, [row])
