"""Counts failed requests during gated rollouts under streaming traffic, on a real node.

KVLINE_ROLLOUTS is the number of rollouts; every second one would halve the budget and must be
rejected. Beside two threads of short streams a client reads one answer after the other that takes
longer than the default drain, so that its pod often drains meanwhile.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

from local import LocalCluster
from playground import Space
from record import record, table
from support import up, wait
from traffic import Streams, streaming

MANY = int(os.environ.get("KVLINE_ROLLOUTS", "50"))
THREADS = 2
CLIENT = Path(__file__).parents[1] / "tests" / "e2e" / "crowd.py"
LONG, DEFAULT_DRAIN = 180, 120  # seconds; a long stream takes LONG at the pace of its start
NAME = "soak"
TOKENS, CONTEXT = 8192, 4096
SPEC = {
    "model": {"source": "pvc://models/smollm2", "loadFormat": "random"},
    "resources": {"cpu": "100m", "memory": "2Gi"},
    "drainSeconds": 900,
}


def spec(requests: int, tokens: int) -> dict[str, Any]:
    """Another number of running requests is another revision; half the tokens is a loss."""
    engine = {"maxModelLen": CONTEXT, "maxPrefillTokens": 128, "maxRunningRequests": requests}
    return {**SPEC, "engine": engine, "capacity": {"kvTokens": tokens}}


def rollout(space: Space, number: int, requests: int) -> tuple[int, str]:
    """One change; gives the running requests of what serves after it, and the gate's result."""
    bad = number % 2 == 1
    wanted = 3 if requests == 4 else 4
    before = _status(space)["rollout"]["stableRevision"]
    space.apply(NAME, **spec(wanted, TOKENS // 2 if bad else TOKENS))
    if bad:
        wait(space, NAME, "UpToDate", 300, reason="RevisionRejected")
    else:
        _until_other(space, before)
        wait(space, NAME, "UpToDate", 300, status="True")
    status = _status(space)
    changed = status["rollout"]["stableRevision"] != before
    if changed == bad or status["capacity"]["kvTokens"] < TOKENS:
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


@contextmanager
def long_streams(cluster: LocalCluster, ip: str) -> Iterator[list[dict[str, Any]]]:
    """How each ended; the last one is waited for."""
    ends: list[dict[str, Any]] = []
    stop = Event()

    def read() -> None:
        words = [sys.executable, str(CLIENT), "stream", ip, NAME, str(LONG), str(CONTEXT - 64)]
        while not stop.is_set():
            done = cluster.network.run(words, check=False)
            lines = done.stdout.splitlines()
            ends.append(json.loads(lines[-1]) if lines else {"ended": done.stderr[-200:]})

    reader = Thread(target=read)
    reader.start()
    try:
        yield ends
    finally:
        stop.set()
        reader.join()


def run() -> None:
    cluster = LocalCluster("bench")
    started = time.monotonic()
    results: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            space = up(cluster, "team")
            space.apply(NAME, **spec(4, TOKENS))
            wait(space, NAME, "UpToDate", status="True")
            ip = (space.get("service", NAME) or {})["spec"]["clusterIP"]
            started, requests = time.monotonic(), 4
            with (
                long_streams(cluster, ip) as long,
                streaming(cluster.network, ip, NAME, Path(folder), THREADS) as streams,
            ):
                for number in range(MANY):
                    requests, result = rollout(space, number, requests)
                    results.append(result)
                    print(f"  {number + 1}/{MANY}: {result}, {time.monotonic() - started:.0f} s")
        finally:
            cluster.down()
    report(results, streams, long, time.monotonic() - started)


def report(
    results: list[str], streams: Streams, long: list[dict[str, Any]], seconds: float
) -> None:
    broken = [str(end) for end in long if end.get("ended") != "length"]
    longer = sum(end.get("seconds", 0) > DEFAULT_DRAIN for end in long)
    failures = [*streams.failures, *broken]
    failed = len(failures)
    record(f"rollouts-{MANY}-failed-requests", failed, "requests", (failed, failed))
    record(f"rollouts-{MANY}-long-streams", longer, "streams", (longer, longer))
    for text in failures[:5]:
        print(f"failed: {text}")
    row = [
        str(len(results)),
        str(results.count("Passed")),
        str(results.count("Rejected")),
        f"{seconds:.0f}",
        str(len(streams.ended)),
        str(longer),
        str(failed),
    ]
    head = ["rollouts", "passed", "rejected", "seconds", "short streams"]
    head += [f"of more than {DEFAULT_DRAIN} s", "failed (bar 0)"]
    table("Rollouts under streaming traffic", head, [row])
