"""The table at the end of a run, and build/test-run.json: where the time went."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from results import Test
from stages import Ran
from waiting import KINDS

from kvline_contract.times import now

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "build" / "test-run.json"
FILES, FIXTURES = 20, 12  # lines of the table; the file has all
MOST_LINES, WIDEST = 6, 300  # of an error: lines, and letters of one
# What is no wait: the test computes, or programs do that it has started.
REST = "compute"
DIRTY = "-dirty"  # behind a commit that the tree differs from


@dataclass
class Run:
    """A whole run, or one of some stages."""

    wanted: list[str]
    commit: str = "unknown"  # of the tree as the run began
    checks: dict[str, bool] = field(default_factory=dict)
    install_seconds: float = 0.0  # before the suite itself: packages
    check_seconds: float = 0.0
    build_seconds: float = 0.0  # that stages waited for what clusters are made of
    cached: bool = True  # whether that was there when the run began
    stages: list[Ran] = field(default_factory=list)
    unstable: dict[str, str] = field(default_factory=dict)  # test -> both outputs
    late: list[str] = field(default_factory=list)  # failed by a limit, and did not pass later
    faults: list[str] = field(default_factory=list)  # of the run, of no test
    seconds: float = 0.0

    def outcome(self, name: str) -> int:
        return sum(stage.count()[name] for stage in self.stages)

    @property
    def passed(self) -> int:
        return self.outcome("passed") + sum(self.checks.values())

    @property
    def failed(self) -> int:
        checks = sum(not passed for passed in self.checks.values())
        return self.outcome("failed") + len(self.late) + checks + len(self.faults)

    @property
    def skipped(self) -> int:
        return self.outcome("skipped")

    def last_line(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def waited(tests: Iterable[Test]) -> dict[str, float]:
    """Seconds by KINDS and REST, of tests one after the other."""
    out, total = dict.fromkeys(KINDS, 0.0), 0.0
    for test in tests:
        total += test.seconds
        for kind, seconds in test.waited.items():
            out[kind] += seconds
    out[REST] = max(0.0, total - sum(out.values()))
    return {kind: round(out[kind], 1) for kind in (*KINDS, REST)}


def by_file(tests: Mapping[str, Test]) -> dict[str, list[Test]]:
    out: dict[str, list[Test]] = {}
    for name, test in tests.items():
        out.setdefault(name.partition("::")[0], []).append(test)
    return dict(sorted(out.items(), key=lambda item: -sum(test.seconds for test in item[1])))


def by_fixture(tests: Iterable[Test]) -> dict[str, tuple[int, float]]:
    """How often each was made, and seconds in all."""
    made: dict[str, list[float]] = {}
    for test in tests:
        for name, seconds in test.fixtures.items():
            made.setdefault(name, []).append(seconds)
    out = {name: (len(each), round(sum(each), 1)) for name, each in made.items()}
    return dict(sorted(out.items(), key=lambda item: -item[1][1]))


def document(run: Run) -> dict[str, Any]:
    return {
        "commit": run.commit.removesuffix(DIRTY),
        "dirty": run.commit.endswith(DIRTY),
        "date": now(),
        "stages_wanted": run.wanted,
        "seconds": round(run.seconds, 1),
        "install_seconds": round(run.install_seconds, 1),
        "check_seconds": round(run.check_seconds, 1),
        "build_seconds": round(run.build_seconds, 1),
        "programs_cached": run.cached,
        "stages": {stage.name: of_stage(stage) for stage in run.stages},
        "passed": run.passed,
        "failed": run.failed,
        "skipped": run.skipped,
        "unstable": sorted(run.unstable),
        "failures": failures(run),
    }


def of_stage(stage: Ran) -> dict[str, Any]:
    tests = stage.tests.values()
    return {
        "seconds": round(stage.seconds, 1),
        "cpu_seconds": round(stage.cpu_seconds, 1),
        "slowness": stage.slowness,
        **{name: stage.count()[name] for name in ("passed", "failed", "late", "skipped")},
        "waited": waited(tests),
        "files": {
            file: {"tests": len(found), "seconds": round(sum(t.seconds for t in found), 1)}
            for file, found in by_file(stage.tests).items()
        },
        "fixtures": {
            name: {"times": times, "seconds": seconds}
            for name, (times, seconds) in by_fixture(tests).items()
        },
    }


def failures(run: Run) -> list[str]:
    wrong = [
        name
        for stage in run.stages
        for name, test in stage.tests.items()
        if test.outcome == "failed"
    ]
    checks = (name for name, good in run.checks.items() if not good)
    return [*wrong, *run.late, *checks, *run.faults]


def why(run: Run, name: str) -> list[str]:
    """The first lines of the error of a test that failed: a log may be cut before its traceback."""
    outputs = [stage.tests[name].output for stage in run.stages if name in stage.tests]
    lines = [line for line in "".join(outputs).splitlines() if line.startswith("E ")]
    return [f"  {line[:WIDEST]}" for line in lines[:MOST_LINES]]


def table(run: Run) -> str:
    """Seconds by stage and what was waited for, by file and by fixture. Stages run side by side,
    and so do tests of one: their seconds add up to more than the run's."""
    head = f"{'seconds':>24} {'CPU':>6} {'slow':>5} {'tests':>6} "
    lines = ["== where the time went", head + " ".join(f"{kind:>8.8}" for kind in (*KINDS, REST))]
    lines.append(f"   {'packages':<12} {run.install_seconds:>8.0f}")
    lines.append(f"   {'check':<12} {run.check_seconds:>8.0f}")
    lines.append(f"   {'build':<12} {run.build_seconds:>8.0f}")
    for stage in run.stages:
        spent = waited(stage.tests.values())
        figures = f"{stage.seconds:>8.0f} {stage.cpu_seconds:>6.0f} {stage.slowness:>5.2f} "
        figures += f"{len(stage.tests):>6} " + " ".join(f"{s:>8.0f}" for s in spent.values())
        lines.append(f"   {stage.name:<12} {figures}")
    lines.append(f"   {'whole run':<12} {run.seconds:>8.0f}")
    every = {name: test for stage in run.stages for name, test in stage.tests.items()}
    lines.append(f"   files, the {FILES} longest: seconds, tests, and what they waited for")
    for file, tests in list(by_file(every).items())[:FILES]:
        spent = {kind: s for kind, s in waited(tests).items() if s >= 1}
        on = ", ".join(f"{kind} {seconds:.0f}" for kind, seconds in spent.items())
        lines.append(f"   {sum(t.seconds for t in tests):>7.0f} {len(tests):>5}  {file}: {on}")
    lines.append(f"   fixtures, the {FIXTURES} longest: seconds, times")
    for name, (times, seconds) in list(by_fixture(every.values()).items())[:FIXTURES]:
        lines.append(f"   {seconds:>7.0f} {times:>5}  {name}")
    return "\n".join(lines)


def write(run: Run) -> None:
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(document(run), indent=1) + "\n")
