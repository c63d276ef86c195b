"""What a time limit that passed once costs: a line, not the run; and no more than a few lines.

A test that failed by time limits alone runs once more at the end, by itself. If it passes then, it
is unstable. docs/unstable.md lists those that are known, with what each waits for and since when.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "unstable.md"
MOST = 2  # unstable tests in a run
DAYS = 14  # that a test may be listed
ROW = re.compile(r"^\| `(?P<test>[^`]+)` \| (?P<waits>[^|]+) \| (?P<since>\d{4}-\d\d-\d\d) \|$")


@dataclass(frozen=True, slots=True)
class Listed:
    test: str  # path::name, without parameters
    waits_for: str
    since: date


def listed(text: str) -> list[Listed]:
    """The rows of docs/unstable.md. Raises ValueError for one that cannot be read."""
    rows = [line for line in text.splitlines() if line.startswith("|")][2:]
    found = []
    for line in rows:
        row = ROW.match(line)
        if row is None:
            raise ValueError(f"docs/unstable.md: not | `path::test` | what | YYYY-MM-DD |: {line}")
        found.append(Listed(row["test"], row["waits"].strip(), date.fromisoformat(row["since"])))
    return found


def faults(unstable: list[str], known: list[Listed], today: date) -> list[str]:
    """Why a run is red for its unstable tests (with their parameters), each as a line."""
    out = []
    if len(unstable) > MOST:
        out.append(f"{len(unstable)} tests are unstable; a run may have {MOST}")
    for row in known:
        days = (today - row.since).days
        if days > DAYS:
            out.append(f"{row.test} has been in docs/unstable.md for {days} days, {DAYS} at most")
    return out


def unlisted(unstable: list[str], known: list[Listed]) -> list[str]:
    """Those that docs/unstable.md must gain."""
    names = {row.test for row in known}
    return [test for test in unstable if test.partition("[")[0] not in names]
