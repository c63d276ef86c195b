"""Counts failed requests during gated rollouts under streaming traffic, on a real node.

KVLINE_ROLLOUTS is the number of rollouts; every second one would halve the budget and must be
rejected.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from local import LocalCluster
from playground import Space
from record import record, table
from support import up, wait
from traffic import Streams, streaming

MANY = int(os.environ.get("KVLINE_ROLLOUTS", "50"))
THREADS = 2
NAME = "soak"
SPEC = {
    "model": {"source": "pvc://models/smollm2", "loadFormat": "random"},
    "resources": {"cpu": "100m", "memory": "1536Mi"},
}


def spec(requests: int, tokens: int) -> dict[str, Any]:
    """Another number of running requests is another revision; half the tokens is a loss."""
    engine = {"maxModelLen": 512, "maxPrefillTokens": 128, "maxRunningRequests": requests}
    return {**SPEC, "engine": engine, "capacity": {"kvTokens": tokens}}


def rollout(space: Space, number: int, requests: int) -> tuple[int, str]:
    """One change; gives the running requests of what serves after it, and the gate's result."""
    bad = number % 2 == 1
    wanted = 3 if requests == 4 else 4
    before = _status(space)["rollout"]["stableRevision"]
    space.apply(NAME, **spec(wanted, 2048 if bad else 4096))
    if bad:
        wait(space, NAME, "UpToDate", 300, reason="RevisionRejected")
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
        try:
            space = up(cluster, "team")
            space.apply(NAME, **spec(4, 4096))
            wait(space, NAME, "UpToDate", status="True")
            ip = (space.get("service", NAME) or {})["spec"]["clusterIP"]
            started, requests = time.monotonic(), 4
            with streaming(cluster.network, ip, NAME, Path(folder), THREADS) as streams:
                for number in range(MANY):
                    requests, result = rollout(space, number, requests)
                    results.append(result)
                    print(f"  {number + 1}/{MANY}: {result}, {time.monotonic() - started:.0f} s")
        finally:
            cluster.down()
    tell(results, streams, time.monotonic() - started)


def tell(results: list[str], streams: Streams, seconds: float) -> None:
    failed = len(streams.failures)
    record(f"rollouts-{MANY}-failed-requests", failed, "requests", (failed, failed))
    for text in streams.failures[:5]:
        print(f"failed: {text}")
    row = [
        str(len(results)),
        str(results.count("Passed")),
        str(results.count("Rejected")),
        f"{seconds:.0f}",
        str(len(streams.ended)),
        str(failed),
    ]
    head = ["rollouts", "passed", "rejected", "seconds", "streams", "failed (bar 0)"]
    table("Rollouts under streaming traffic", head, [row])
