"""The validated budget against the largest that passes the same stress.

Runs `kvline-server size` in a memory cgroup of 2 GiB, then pins larger budgets by bisection.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import demo_engines
from record import record, table

LIMIT = 2 << 30
CGROUP = Path("/sys/fs/cgroup/memory/kvline-bench")
CLOSE = 256  # tokens; the search stops there
CRAWL = 2.0  # times a normal start; a slower one thrashes: it keeps re-reading file pages


def size(*extra: str, patience: float | None = None) -> tuple[dict[str, Any], float]:
    """A sizing report and its seconds; state Failed where the size did not pass, or took longer
    than `patience`.

    Drops the page cache first: a file page is charged to the cgroup that read it first, so pages
    that others have read would be free for this container."""
    Path("/proc/sys/vm/drop_caches").write_text("1")
    started = time.perf_counter()
    command = [sys.executable, "-m", "kvline_server", "size", "--model", str(demo_engines.folder())]
    try:
        done = subprocess.run(
            [*command, "--json", *extra],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=False,
            timeout=patience,
            preexec_fn=lambda: (CGROUP / "cgroup.procs").write_text(str(os.getpid())),
        )
    except subprocess.TimeoutExpired:
        _end_all()
        return {"state": "Failed"}, time.perf_counter() - started
    return dict(json.loads(done.stdout)), time.perf_counter() - started


def _end_all() -> None:
    """The children of a server that was killed end by themselves, once they get to run."""
    while pids := (CGROUP / "cgroup.procs").read_text().split():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.1)


def run() -> None:
    if not CGROUP.parent.is_dir() or os.geteuid() != 0:
        print("sizing: needs root and cgroup v1")
        return
    CGROUP.mkdir(exist_ok=True)
    (CGROUP / "memory.limit_in_bytes").write_text(str(LIMIT))
    try:
        _search()
    finally:
        CGROUP.rmdir()


def _search() -> None:
    found = []
    pace = 0.0
    for number in range(3):
        report, took = size()
        pace = max(pace, took)
        found.append(report["result"])
        tries = max(a["number"] for a in report["attempts"])
        print(
            f"  measured {number + 1}: {found[-1]['kvTokens']} tokens, attempt {tries}", flush=True
        )
    tokens = min(r["kvTokens"] for r in found)
    spread = (tokens, max(r["kvTokens"] for r in found))
    survives, fails = tokens, round(tokens * 1.12)
    while fails - survives > CLOSE:
        middle = (survives + fails) // 2
        report, seconds = size("--kv-tokens", str(middle), patience=CRAWL * pace)
        good = report["state"] == "Validated"
        survives, fails = (middle, fails) if good else (survives, middle)
        print(f"  pinned {middle}: {'survived' if good else 'died'} ({seconds:.0f} s)", flush=True)
    loop = min(r["loopMs"] for r in found) / 1000
    idle = max(r["memory"]["headroomMiB"] for r in found)
    record("kv-tokens-smollm2-2gib", tokens, "tokens", spread)
    record("kv-of-largest", tokens / survives, "ratio", (tokens / fails, tokens / survives))
    record("profile-loop-s", loop, "s", (loop, max(r["loopMs"] for r in found) / 1000))
    record("idle-mib", idle, "MiB", (min(r["memory"]["headroomMiB"] for r in found), idle))
    rows = [
        ["KV tokens, least of three", str(tokens), ""],
        ["largest that survives", f"{survives} to {fails}", ""],
        ["share of it", f"{tokens / survives:.3f}", "0.95"],
        ["profile loop, s", f"{loop:.1f}", "60"],
        ["free after validation, MiB", str(idle), "32 + 64"],
    ]
    table("Sizing, SmolLM2-135M, 2 GiB", ["figure", "value", "bar"], rows)
