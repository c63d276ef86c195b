"""python bench demo: records what the last whole `make demo` took, which this tree ran on a cluster
of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from record import record

FILE = Path(__file__).resolve().parents[1] / "build" / "demo.json"


def run() -> None:
    if not FILE.is_file():
        sys.exit(f"{FILE.name} is not there: run make demo first")
    made = json.loads(FILE.read_text())
    name = "demo-s" if made["programs_cached"] else "demo-cold-s"
    record(name, made["seconds"], "s", (made["seconds"],) * 2, command="make demo")
    print(f"{name}: {made['seconds']:.0f} s")
