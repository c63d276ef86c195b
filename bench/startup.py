"""From the command to Validated, imports included: searched, and from a record of that search."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import offline
from record import record, table
from shapes import SHAPES


def size(folder: Path, *words: str) -> tuple[float, dict[str, object]]:
    command = [sys.executable, "-m", "kvline_server", "size", "--model", str(folder), "--json"]
    command += ["--load", "random", "--max-model-len", str(offline.MAX_MODEL_LEN), *words]
    began = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return time.perf_counter() - began, dict(json.loads(done.stdout))


def run() -> None:
    rows = []
    for name in os.environ.get("KVLINE_BENCH_MODELS", ",".join(SHAPES)).split(","):
        with tempfile.TemporaryDirectory() as scratch:
            folder = offline.write_config(name, Path(scratch))
            kept = Path(scratch) / "records.json"
            starts = [
                ("first", *size(folder, "--write-record", str(kept))),
                ("again", *size(folder)),
                ("recorded", *size(folder, "--record", str(kept))),
            ]
        for kind, seconds, report in starts:
            result = report["result"]
            assert isinstance(result, dict)
            gpu = str(dict(report["provenance"])["gpu"])  # type: ignore[call-overload]
            record(f"startup-{kind}-s-{name}", seconds, "s", (seconds, seconds), gpu)
            loop = int(result["loopMs"]) / 1000
            figures = [f"{seconds:.1f}", f"{loop:.1f}", str(result["kvTokens"]), result["source"]]
            rows.append([name, kind, *figures])
    head = ["model", "start", "seconds", "of them loop", "KV tokens", "source"]
    table("From the command to Validated", head, rows)
