"""Which faults and bad inputs have a test, what it shows, and how the last whole run went.

tests/catalogue.tsv lists every fault, bad resource, bad request and load figure that must have a
row. A test names the ones it covers:

    @pytest.mark.fault("F10", shows="30 % of calls fail for 10 s; the service is there 30 s after")

or by an id in its name or docstring, whose first sentence is then what it shows. `make test` writes
docs/reliability.md; `python tests/suite/catalogue.py` writes it from what the tests say of
themselves and the last run's verdicts.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("KVLINE_TEST_CACHE", ROOT / ".cache"))  # of what a run writes down
FOLDER = CACHE / "faults"
AGAIN = "again-"  # of a stage's name: a test that runs once more
COMMIT = FOLDER / "commit"  # of the last whole run
CATALOGUE = ROOT / "tests" / "catalogue.tsv"
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- faults: written by make test -->\n", "<!-- end -->\n"
ID = re.compile(r"\b([FCHL])(\d{2})\b(?:-([FCHL]?)(\d{2})\b)?")
LEADING = re.compile(r"^(?:[FCHL]\d{2}(?:-[FCHL]?\d{2})?(?:'s core)?(?:, | and |: ?|\. ?)?)+")


def ids(text: str) -> set[str]:
    """F01, H13-empty, and F22-F25 as each of them."""
    found = set()
    for letter, first, _, last in ID.findall(text):
        found |= {f"{letter}{n:02}" for n in range(int(first), int(last or first) + 1)}
    return found


def shown(item: Any) -> dict[str, str]:
    """Fault id -> what the test shows of it."""
    doc = " ".join((getattr(item.obj, "__doc__", None) or "").split())
    words = item.originalname.removeprefix("test_").replace("_", " ")
    text = LEADING.sub("", doc).strip() if ids(doc) else ""
    sentence = re.split(r"(?<=[.?!])\s", text)[0].rstrip(".") or words
    found = dict.fromkeys(ids(f"{item.name} {doc}"), sentence)
    for mark in item.iter_markers("fault"):
        for name in mark.args:
            found |= dict.fromkeys(ids(name), mark.kwargs.get("shows", sentence))
    return found


# What became of a test, each worse than the one before: of its parameters the worst counts. Late is
# one that failed by a time limit alone, unstable one that was late and passed once more, alone.
VERDICTS = ("not run", "passed", "unstable", "late", "failed")


@dataclass
class Seen:
    """A test of one fault: what it shows, and what became of it."""

    shows: str
    verdict: str = "not run"

    def add(self, verdict: str) -> None:
        self.verdict = max(self.verdict, verdict, key=VERDICTS.index)

    def again(self, verdict: str) -> None:
        """What became of it when it ran once more."""
        if verdict != "passed":  # of another parameter, it may be
            self.verdict = "failed"
        elif self.verdict == "late":
            self.verdict = "unstable"


class Collector:
    """A pytest plug-in that writes fault id -> test -> Seen, deselected tests included."""

    def __init__(self, stage: str) -> None:
        self.file = f"{stage}{os.environ.get('PYTEST_XDIST_WORKER', '')}.json"
        self.seen: dict[str, dict[str, Seen]] = {}

    def _tests(self, item: Any) -> list[Seen]:
        where = f"{os.path.relpath(item.path, ROOT / 'tests')}::{item.originalname}"
        return [
            self.seen.setdefault(fault, {}).setdefault(where, Seen(text))
            for fault, text in shown(item).items()
        ]

    def pytest_itemcollected(self, item: Any) -> None:
        self._tests(item)

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        if call.when != "call" and call.excinfo is None:
            return
        if call.excinfo is not None and call.excinfo.errisinstance(_skipped()):
            return
        for test in self._tests(item):
            test.add("passed" if call.excinfo is None else _failure(call.excinfo.value))

    def pytest_sessionfinish(self) -> None:
        FOLDER.mkdir(parents=True, exist_ok=True)
        plain = {
            fault: {where: [test.shows, test.verdict] for where, test in tests.items()}
            for fault, tests in self.seen.items()
        }
        (FOLDER / self.file).write_text(json.dumps(plain))


def _skipped() -> type[BaseException]:
    import pytest

    return pytest.skip.Exception


def _failure(error: BaseException) -> str:
    from results import is_late

    return "late" if is_late(error) else "failed"


def configure(config: Any, stage: str) -> None:
    """Called by conftest."""
    config.pluginmanager.register(Collector(stage))


@dataclass
class Row:
    """A line of the catalogue, with the tests that name it."""

    id: str
    fault: str
    wanted: str = ""
    measured: str = ""  # by which command, outside `make test`
    tests: dict[str, Seen] = field(default_factory=dict, init=False)

    def verdict(self) -> str:
        if not self.tests:
            return f"measured by {self.measured}" if self.measured else "**not tested**"
        if failed := self.those("failed", "late"):
            return f"**FAILED**: {', '.join(failed)}"
        if unstable := self.those("unstable"):
            return f"unstable: {', '.join(unstable)}"
        rest = self.those("not run")
        if len(rest) == len(self.tests):
            return "not run"
        return f"passed ({len(rest)} not run)" if rest else "passed"

    def those(self, *verdicts: str) -> list[str]:
        return sorted(name for name, test in self.tests.items() if test.verdict in verdicts)

    def line(self) -> str:
        files = sorted({name.partition("::")[0] for name in self.tests})
        shows = list(dict.fromkeys(test.shows for test in self.tests.values()))
        cells = [self.id, self.fault, self.wanted, "; ".join(shows), ", ".join(files)]
        if self.tests and self.measured:
            cells[4] += f"; measured by {self.measured}"
        return "| " + " | ".join(c.replace("|", "\\|") for c in [*cells, self.verdict()]) + " |"


def rows() -> dict[str, Row]:
    lines = (line.split("\t") for line in CATALOGUE.read_text().splitlines())
    return {cells[0]: Row(*cells) for cells in lines}


def collected(rows: dict[str, Row]) -> dict[str, Row]:
    """With what the runs of all stages wrote down, and then those of single tests that ran once
    more. Raises KeyError for an id that is not listed."""
    files = sorted(FOLDER.glob("*.json"), key=lambda file: (file.name.startswith(AGAIN), file.name))
    for file in files:
        for fault, tests in json.loads(file.read_text()).items():
            for where, (shows, verdict) in tests.items():
                test = rows[fault].tests.setdefault(where, Seen(shows))
                if not file.name.startswith(AGAIN):
                    test.add(verdict)
                elif verdict != "not run":
                    test.again(verdict)
    return rows


def commit() -> str:
    """Of the tree, with -dirty where tracked files differ from it."""
    words = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def clear() -> None:
    """Before a whole run: what an older one wrote is of tests that may be gone."""
    for file in FOLDER.glob("*.json"):
        file.unlink()
    FOLDER.mkdir(parents=True, exist_ok=True)
    COMMIT.write_text(commit())


def table(rows: dict[str, Row]) -> list[str]:
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    untested = [row.id for row in rows.values() if not row.tests and not row.measured]
    whole = COMMIT.read_text() if COMMIT.is_file() else "unknown"
    idle = [row.id for row in rows.values() if row.verdict() == "not run"]
    return [
        f"Written {day}: {len(rows)} rows, {len(rows) - len(untested)} with a test or a figure. "
        f"The last whole run was of commit {whole}.",
        f"Not tested: {', '.join(untested) or 'none'}. "
        f"With a test that the last run left out: {', '.join(idle) or 'none'}.",
        "",
        "| id | fault, input or figure | wanted | what is asserted | tests | last run |",
        "|---|---|---|---|---|---|",
        *(row.line() for row in rows.values()),
    ]


def write() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    lines = table(collected(rows()))
    PAGE.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + after)


def collect() -> None:
    """What the tests say of themselves now, without running them."""
    for file in FOLDER.glob("collected*.json"):
        file.unlink()
    subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:xdist"],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "KVLINE_STAGE": "collected"},
    )


if __name__ == "__main__":
    collect()
    write()
