"""python bench test-run: records what the last whole `make test` took, from build/test-run.json."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from record import record, table

FILE = Path(__file__).resolve().parents[1] / "build" / "test-run.json"


def run() -> None:
    if not FILE.is_file():
        sys.exit(f"{FILE.name} is not there: run make test first")
    made = json.loads(FILE.read_text())
    if made["stages_wanted"]:
        sys.exit(f"the last run was of {', '.join(made['stages_wanted'])} alone: run make test")
    if made["failed"] or made["dirty"]:
        sys.exit("the last run failed, or was of a tree that differs from its commit")
    os.environ["KVLINE_COMMIT"] = made["commit"]
    whole = "test-run-s" if made["programs_cached"] else "test-run-cold-s"
    cpu = sum(made["stages"][name]["cpu_seconds"] for name in ("unit", "kernels"))
    figures = {
        whole: (made["seconds"], "s"),
        "unit-s": (made["stages"]["unit"]["seconds"], "s"),
        "unit-and-kernels-cpu-s": (cpu, "s"),
        "test-unstable": (len(made["unstable"]), "tests"),
    }
    for name, (value, unit) in figures.items():
        record(name, value, unit, (value, value), command="make test")
    head = ["stage", "seconds", "CPU s", "slowness", "passed", "failed", "late", "skipped"]
    keys = ("seconds", "cpu_seconds", "slowness", "passed", "failed", "late", "skipped")
    rows = [[name, *(str(s[key]) for key in keys)] for name, s in made["stages"].items()]
    table(f"make test of {made['commit']}: {made['seconds']:.0f} s", head, rows)
