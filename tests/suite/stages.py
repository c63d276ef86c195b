"""The stages of a test run, and how one runs: pytest as a process, whose lines are shown as they
come, each with its stage's name."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import catalogue
import results
import speed
import waiting

ROOT = Path(__file__).resolve().parents[2]
PYTEST = [sys.executable, "-m", "pytest", "-q", "--no-header"]
SHARED = {
    "PYTHONUNBUFFERED": "1",  # what is printed is seen
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_WAIT_POLICY": "passive",  # threads of torch that wait take no core of what runs beside
}
# Two threads of torch in each of two workers wait for each other by spinning.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
ONE_BY_ONE = ("--dist", "load", "--maxschedchunk", "1")
KERNELS = tuple(str(path) for path in (ROOT / "tests/server").glob("test_*_kernels.py"))
OTHERS = "kernels or process or clients or integration or e2e or recipe or rehearsal or gpu"


def marked(marker: str) -> tuple[str, ...]:
    """Files that have it. Of a stage in few files only these are collected: to import all of them
    takes each worker ten seconds."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    return tuple(str(path) for path in found if f"pytest.mark.{marker}" in path.read_text())


@dataclass(frozen=True, slots=True)
class Stage:
    name: str
    options: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    clustered: bool = False  # needs root, and what the clusters are made of


STAGES = {
    stage.name: stage
    for stage in (
        Stage("unit", ("-n", "2", "-m", f"not ({OTHERS})"), ONE_THREAD),
        # One process, beside another stage. Its tests are few, and long.
        Stage("kernels", ("-m", "kernels", *KERNELS), ONE_THREAD),
        Stage("process", ("-n", "2", "--dist", "loadfile", "-m", "process", *marked("process"))),
        # A server for all of them.
        Stage("clients", ("-v", "-m", "clients", "tests/clients")),
        # Each worker has a cluster. Tests often wait for it, so three share two cores.
        Stage("integration", ("-n", "3", "-m", "integration", "tests/integration"), clustered=True),
        # As there. A line a test, as some take minutes: the longest first, each to a free worker.
        Stage("e2e", ("-vv", "-n", "2", *ONE_BY_ONE, "-m", "e2e", "tests/e2e"), clustered=True),
        # Prometheus and its adapter take minutes to build.
        Stage("recipes", ("-v", "-m", "recipe", "tests/e2e"), clustered=True),
        # What it prints is the demo.
        Stage("rehearsal", ("-s", "-m", "rehearsal", "tests/demo"), clustered=True),
    )
}
ALWAYS = ("unit", "kernels", "process")  # need no root, no cluster, no GPU


@dataclass
class Ran:
    """A stage that ran, or a test of it that ran once more."""

    name: str
    seconds: float = 0.0
    cpu_seconds: float = 0.0  # without what outlives the stage's processes, as a cluster does
    slowness: float = 1.0
    code: int = 0
    tests: dict[str, results.Test] = field(default_factory=dict)
    output: str = ""

    def count(self) -> Counter[str]:
        return Counter(test.outcome for test in self.tests.values())

    def broken(self) -> str:
        """Why the stage itself failed, where no test of it says so; pytest's code is 1 where tests
        failed, and 5 where there was none."""
        count = self.count()
        excused = self.code in (0, 5) or (self.code == 1 and (count["failed"] or count["late"]))
        if not excused:
            return f"{self.name}: pytest ended with code {self.code}"
        if self.name in ALWAYS and not count["passed"]:
            return f"{self.name}: nothing passed, which no machine excuses"
        return ""


_printing = threading.Lock()


def say(text: str) -> None:
    """A line; those of stages side by side do not mix."""
    with _printing:
        print(text, flush=True)


def run(stage: Stage) -> Ran:
    say(f"== {stage.name}")
    ran = _pytest(stage, stage.name, list(stage.options))
    say(f"   {stage.name} took {ran.seconds:.0f} s")
    return ran


def again(stage: Stage, test: str, number: int) -> Ran:
    """One test by itself; its results are beside those of the stage."""
    say(f"== once more, alone: {test}")
    return _pytest(stage, f"{catalogue.AGAIN}{number}", ["-rA", test])


def _pytest(stage: Stage, name: str, options: list[str]) -> Ran:
    began = time.monotonic()
    # Lanes that begin together measure together: what each of their stages will have beside it.
    ran = Ran(stage.name, slowness=round(speed.slowness(), 2))
    if ran.slowness >= speed.MOST:
        say(f"{name:>11} | this machine is slower than limits grow: {speed.MOST:g} times")
    process = subprocess.Popen(
        [*PYTEST, *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={
            **os.environ,
            **SHARED,
            **stage.environment,
            "KVLINE_STAGE": name,
            waiting.SLOWNESS: str(ran.slowness),
        },
    )
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            ran.output += line
            say(f"{stage.name:>11} | {line.rstrip()}")
    _, status, usage = os.wait4(process.pid, 0)
    ran.code = process.returncode = os.waitstatus_to_exitcode(status)
    ran.cpu_seconds = usage.ru_utime + usage.ru_stime
    ran.tests = results.read(name)
    ran.seconds = time.monotonic() - began
    return ran
