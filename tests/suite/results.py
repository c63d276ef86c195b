"""A pytest plug-in that writes down what became of each test of a stage, and where its time went.

One JSON file a stage in .cache/test-run: {test: Test as a dict}. Workers of pytest-xdist attach
what they know to their reports; the process that collects the reports writes.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import catalogue
import httpcore
import httpx
import pytest
import waiting

FOLDER = catalogue.CACHE / "test-run"
NOTE = "kvline"  # of a report: what a worker knows of the phase
# What says that a limit has passed, and nothing else. An answer that never comes is not among them:
# it is a lost request.
LATE: tuple[type[BaseException], ...] = (
    waiting.NotInTime,
    TimeoutError,
    subprocess.TimeoutExpired,
    httpx.ConnectTimeout,
    httpx.PoolTimeout,
)
# What libraries raise such an error from, and what is being handled while a test polls a server
# that does not listen yet.
BEHIND = (
    OSError,
    asyncio.CancelledError,
    httpcore.TimeoutException,
    httpcore.ConnectError,
    httpx.ConnectError,
)
SHOWN = 0.05  # seconds of a fixture


@dataclass
class Test:
    """What became of one test: passed, failed, late (failed by time limits alone) or skipped."""

    __test__ = False  # not pytest's

    outcome: str = "passed"
    seconds: float = 0.0
    waited: dict[str, float] = field(default_factory=dict)  # by waiting.KINDS
    fixtures: dict[str, float] = field(default_factory=dict)  # made by this test, not found
    output: str = ""  # of a failure

    def add(self, report: Any) -> None:
        """A phase of it."""
        note = dict(report.user_properties).get(NOTE, {})
        self.seconds += report.duration
        for kind, seconds in note.get("waited", {}).items():
            self.waited[kind] = self.waited.get(kind, 0.0) + seconds
        self.fixtures |= note.get("fixtures", {})
        if report.skipped and self.outcome == "passed":
            self.outcome = "skipped"
        if report.failed:
            late = bool(note.get("late")) and self.outcome != "failed"
            self.outcome = "late" if late else "failed"
            self.output += report.longreprtext + "\n"
            self.output += "".join(f"-- {name}\n{text}\n" for name, text in report.sections)


def is_late(error: BaseException) -> bool:
    """Whether it says that a limit has passed, and nothing else: neither does anything that was
    already wrong when it was raised, however far behind and whether it is shown or not."""
    return _says_late(error) and all(
        isinstance(before, BEHIND) or _says_late(before) for before in _before(error)
    )


def _says_late(error: BaseException) -> bool:
    from errors import NotWithin  # of the clusters, whose folder only tests have on their path

    if isinstance(error, BaseExceptionGroup):
        return all(map(is_late, error.exceptions))
    if isinstance(error, pytest.fail.Exception):
        return str(error).startswith("Timeout (>")  # of pytest-timeout
    return isinstance(error, (*LATE, NotWithin))


def _before(error: BaseException) -> Iterator[BaseException]:
    links = {error.__cause__, error.__context__}  # often one and the same
    for before in filter(None, links):
        yield before
        yield from _before(before)


class Results:
    def __init__(self, stage: str, writes: bool) -> None:
        """`writes`: whether this process sees all reports, and so writes the file."""
        self.file = FOLDER / f"{stage}.json"
        self.writes = writes
        self.tests: dict[str, Test] = {}
        self.fixtures: defaultdict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Generator[None, Any, Any]:
        began = time.monotonic()
        try:
            return (yield)
        finally:
            self.fixtures[fixturedef.argname] += time.monotonic() - began

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Generator[None, Any, Any]:
        report = yield
        made = {name: round(took, 3) for name, took in self.fixtures.items() if took > SHOWN}
        note: dict[str, Any] = {"waited": waiting.taken(), "fixtures": made}
        self.fixtures.clear()
        if report.failed and call.excinfo is not None:
            note["late"] = is_late(call.excinfo.value)
        report.user_properties = [*report.user_properties, (NOTE, note)]
        return report

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be collected is a test that has failed."""
        if report.failed:
            self.tests[report.nodeid] = Test("failed", output=report.longreprtext)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.tests.setdefault(report.nodeid, Test()).add(report)

    def pytest_sessionfinish(self) -> None:
        if self.writes:
            FOLDER.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps({name: asdict(t) for name, t in self.tests.items()}))


def configure(config: Any, stage: str) -> None:
    is_worker = hasattr(config, "workerinput")
    config.pluginmanager.register(Results(stage, writes=not is_worker))
    waiting.count_sleeps()


def read(stage: str) -> dict[str, Test]:
    """Empty where the stage has written nothing."""
    file = FOLDER / f"{stage}.json"
    if not file.is_file():
        return {}
    return {name: Test(**found) for name, found in json.loads(file.read_text()).items()}


def clear() -> None:
    """Before a run: what an older one wrote is of another tree."""
    for file in FOLDER.glob("*.json"):
        file.unlink()
