"""What the operator writes while nothing changes: counted by itself, on a real API server."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.request

import crd
from local import LocalCluster
from record import ROOT, record, table

PORT = 18099
SECONDS = int(os.environ.get("KVLINE_BENCH_SECONDS", "600"))
SERVICES = 20


def writes() -> float:
    text = urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=5).read().decode()
    lines = [x for x in text.splitlines() if x.startswith("kvline_api_writes_total ")]
    return float(lines[0].split()[1])


def run() -> None:
    cluster = LocalCluster("bench", "control")
    cluster.down()
    cluster.up(print)
    command = [sys.executable, "-m", "kvline_operator", "--allow-image-tags"]
    command += ["--default-image", "local/server:x", "--probe-port", str(PORT)]
    operator = None
    try:
        crd.define(cluster.kubectl)
        operator = subprocess.Popen(
            command,
            env={
                **os.environ,
                "KUBECONFIG": str(cluster.kubeconfig),
                "KVLINE_NAMESPACE": "default",
            },
        )
        sample = (ROOT / "manifests" / "samples" / "smollm2.yaml").read_text()
        for number in range(SERVICES):
            text = sample.replace("name: smollm2", f"name: s{number}")
            cluster.kubectl("apply", "-f", "-", input=text)
        before, quiet = -1.0, 0
        while quiet < 5:  # settled: five seconds without a write
            time.sleep(1)
            now = writes()
            quiet, before = (quiet + 1, now) if now == before else (0, now)
        time.sleep(SECONDS)
        made = writes() - before
    finally:
        if operator is not None:
            operator.kill()
            operator.wait()
        cluster.down()
    record("operator-idle-writes", made, "writes", (made, made))
    head = ["services", "seconds", "writes", "bar"]
    table("Operator, nothing changed", head, [[str(SERVICES), str(SECONDS), f"{made:.0f}", "0"]])
