"""A result with everything needed to read it later."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "bench" / "results" / "results.jsonl"


def record(name: str, value: float, unit: str, spread: tuple[float, float]) -> None:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    line = {
        "name": name,
        "value": round(value, 4),
        "unit": unit,
        "spread": [round(s, 4) for s in spread],
        "gpu": f"CPU {cpu()}",
        "versions": {p: version(p) for p in ("kvline", "torch", "transformers")},
        "commit": commit,
        "command": "python bench " + " ".join(sys.argv[1:]),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    FILE.parent.mkdir(exist_ok=True)
    with FILE.open("a") as file:
        file.write(json.dumps(line) + "\n")


def cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def table(title: str, head: list[str], rows: list[list[str]]) -> None:
    print(f"\n{title}\n")
    widths = [max(len(str(r[i])) for r in [head, *rows]) for i in range(len(head))]
    for row in [head, ["-" * w for w in widths], *rows]:
        print("  " + "  ".join(str(c).ljust(w) for c, w in zip(row, widths, strict=True)))
    print(flush=True)
