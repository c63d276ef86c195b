"""Which faults and bad inputs the tests of a run had, and how they went: ids of the design's
catalogue, as they stand in tests' names and docstrings. `make test` writes the table.
"""

from __future__ import annotations

import json
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".cache" / "faults"
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- faults: written by make test -->\n", "<!-- end -->\n"
ID = re.compile(r"\b([FCHL])(\d{2})\b(?:-[FCHL]?(\d{2})\b)?")


def ids(text: str) -> set[str]:
    """F01, H13-empty, and F22-F25 as each of them."""
    found = set()
    for letter, first, last in ID.findall(text):
        found |= {f"{letter}{n:02}" for n in range(int(first), int(last or first) + 1)}
    return found


class Collector:
    """A pytest plug-in: id -> test -> whether it passed."""

    def __init__(self, stage: str) -> None:
        self.file = f"{stage}{os.environ.get('PYTEST_XDIST_WORKER', '')}.json"
        self.seen: dict[str, dict[str, bool]] = {}

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        if call.when != "call" and call.excinfo is None:
            return
        if call.excinfo is not None and call.excinfo.errisinstance(_skipped()):
            return
        text = f"{item.name} {getattr(item.obj, '__doc__', None) or ''}"
        where = f"{Path(item.path).relative_to(ROOT / 'tests')}"
        for fault in ids(text):
            tests = self.seen.setdefault(fault, {})
            key = f"{where}::{item.originalname}"
            tests[key] = tests.get(key, True) and call.excinfo is None

    def pytest_sessionfinish(self) -> None:
        FOLDER.mkdir(parents=True, exist_ok=True)
        (FOLDER / self.file).write_text(json.dumps(self.seen))


def _skipped() -> type[BaseException]:
    import pytest

    return pytest.skip.Exception


def configure(config: Any) -> None:
    """Called by conftest; only a run by stages collects."""
    stage = os.environ.get("KVLINE_STAGE")
    if stage:
        config.pluginmanager.register(Collector(stage))


def table() -> list[str]:
    found: dict[str, dict[str, bool]] = {}
    for file in sorted(FOLDER.glob("*.json")):
        for fault, tests in json.loads(file.read_text()).items():
            so_far = found.setdefault(fault, {})
            for test, good in tests.items():
                so_far[test] = so_far.get(test, True) and good
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    lines = [f"Last whole run: {day}.", "", "| id | tests | verdict |", "|---|---|---|"]
    for fault in sorted(found):
        tests = found[fault]
        names = sorted({name.partition("::")[0] for name in tests})
        failed = sorted(name for name, good in tests.items() if not good)
        verdict = f"FAILED: {', '.join(failed)}" if failed else "passed"
        lines.append(f"| {fault} | {len(tests)}: {', '.join(names)} | {verdict} |")
    return lines


def write() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(before + BEGIN + "\n".join(table()) + "\n" + END + after)
