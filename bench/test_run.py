"""python bench test-run: records what the last `make test` took, or the last run of the unit and
kernels stages alone (python tests/suite unit kernels), from build/test-run.json."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from record import record, table

ALONE = ["unit", "kernels"]
FILE = Path(__file__).resolve().parents[1] / "build" / "test-run.json"


def run() -> None:
    if not FILE.is_file():
        sys.exit(f"{FILE.name} is not there: run make test first")
    made = json.loads(FILE.read_text())
    if made["stages_wanted"] not in ([], ALONE):
        sys.exit(f"the last run was of {', '.join(made['stages_wanted'])} alone: run make test")
    if made["failed"] or made["dirty"]:
        sys.exit("the last run failed, or was of a tree that differs from its commit")
    os.environ["KVLINE_COMMIT"] = made["commit"]
    if made["stages_wanted"]:  # with nothing beside them
        command = f"python tests/suite {' '.join(ALONE)}"
        cpu = sum(made["stages"][name]["cpu_seconds"] for name in ALONE)
        figures = {
            "unit-s": (made["stages"]["unit"]["seconds"], "s"),
            "unit-and-kernels-cpu-s": (cpu, "s"),
        }
    else:
        command = "make test"
        figures = {
            "test-run-s" if made["programs_cached"] else "test-run-cold-s": (made["seconds"], "s"),
            "test-unstable": (len(made["unstable"]), "tests"),
        }
    for name, (value, unit) in figures.items():
        record(name, value, unit, (value, value), command=command)
    head = ["stage", "seconds", "CPU s", "slowness", "passed", "failed", "late", "skipped"]
    keys = ("seconds", "cpu_seconds", "slowness", "passed", "failed", "late", "skipped")
    rows = [[name, *(str(s[key]) for key in keys)] for name, s in made["stages"].items()]
    table(f"{command} of {made['commit']}: {made['seconds']:.0f} s", head, rows)
