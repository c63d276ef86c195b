"""make test: check, and then two lanes of stages side by side. Ends with a table of where the time
went, and one line of what passed, failed and was skipped, with the reason of each skip above it.

What the clusters are made of is built meanwhile, at the lowest priority. A test that failed by a
time limit alone runs once more at the end (unstable.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import catalogue
import checks
import results
import stages
import summary
import unstable
from stages import STAGES, Stage, say
from summary import Run

ROOT = Path(__file__).resolve().parents[2]
# Stages side by side: what waits runs beside what computes, and both lanes take about as long.
LANES = (("unit", "process", "kernels"), ("e2e", "integration"))
MOST_AGAIN = 6  # tests that run once more; with more late ones the run is red all the same


def main(wanted: list[str]) -> int:
    # A shell's background jobs ignore it, and so would the programs that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run = Run(wanted, commit=catalogue.commit())
    # Of make, which has installed the packages before.
    began = float(os.environ.get("KVLINE_BEGAN", time.time()))
    lanes = plan(wanted)
    building = None
    if any(stage.clustered for lane in lanes for stage in lane):
        run.cached = is_built()
        building = build()
    results.clear()
    if not wanted:
        catalogue.clear()
    install_clients(lanes, run)
    run.install_seconds = time.time() - began
    if not wanted or "check" in wanted:
        run.checks = checks.run()
        run.check_seconds = time.time() - began - run.install_seconds
    with ThreadPoolExecutor(max(1, len(lanes))) as pool:
        for done in [pool.submit(one_after_the_other, lane, building, run) for lane in lanes]:
            done.result()
    try_again(run)
    if not wanted:
        catalogue.write()
    run.seconds = time.time() - began
    return close(run)


def plan(wanted: list[str]) -> list[list[Stage]]:
    """The stages of each lane. Those that are named run one after the other."""
    if wanted:
        named = [stage for name, stage in STAGES.items() if name in wanted]
        return [named] if named else []
    return [[STAGES[name] for name in lane] for lane in LANES]


def install_clients(lanes: list[list[Stage]], run: Run) -> None:
    """The environments of the clients that these stages test, where they are not in the cache."""
    names = {stage.name for lane in lanes for stage in lane}
    if not names & {"process", "clients"}:
        return
    every = ["all"] if "clients" in names else []
    command = [sys.executable, "tests/clients/environments.py", *every]
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        run.faults.append("the environments of clients could not be made")


def one_after_the_other(
    lane: list[Stage], building: subprocess.Popen[str] | None, run: Run
) -> None:
    for stage in lane:
        if stage.clustered and building is not None:
            await_build(building, run)
        run.stages.append(stages.run(stage))


def is_built() -> bool:
    command = [sys.executable, "tests/cluster", "is-built"]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def build() -> subprocess.Popen[str] | None:
    """Starts to build programs, images and the model of the clusters, where they are not in the
    cache yet; without root the stage itself says why it runs nothing."""
    if os.geteuid() != 0:
        return None
    command = ["nice", "-n", "19", sys.executable, "tests/cluster", "build"]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


_awaiting = threading.Lock()  # both lanes may


def await_build(building: subprocess.Popen[str], run: Run) -> None:
    """Waits for the build, and shows what it has done and does."""
    with _awaiting:
        if building.returncode is not None:
            return
        began = time.monotonic()
        say("== what the clusters are made of")
        assert building.stdout is not None
        for line in building.stdout:
            say(line.rstrip())
        if building.wait():
            run.faults.append("what the clusters are made of could not be built")
        run.build_seconds = time.monotonic() - began


def try_again(run: Run) -> None:
    """Runs each late test once more, by itself: unstable where it passes then."""
    late = [
        (stage, name, test)
        for stage in run.stages
        for name, test in stage.tests.items()
        if test.outcome == "late"
    ]
    for number, (stage, name, first) in enumerate(late):
        if number >= MOST_AGAIN:
            run.late.append(name)
            continue
        second = stages.again(STAGES[stage.name], name, number)
        if second.count()["passed"] == 1 and not second.code:
            run.unstable[name] = f"{first.output}\n-- and the second time:\n{second.output}"
        else:
            run.late.append(name)


def known_unstable(run: Run) -> list[unstable.Listed]:
    try:
        return unstable.listed(unstable.PAGE.read_text())
    except ValueError as error:
        run.faults.append(str(error))
        return []


def close(run: Run) -> int:
    """Says what became of the run, and writes it down. -> the exit code"""
    run.faults += [text for stage in run.stages if (text := stage.broken())]
    known = known_unstable(run)
    run.faults += unstable.faults(list(run.unstable), known, datetime.now(UTC).date())
    summary.write(run)
    say(summary.table(run))
    for name, output in run.unstable.items():
        say(f"UNSTABLE {name}: a limit passed, and alone it passed. The first time:\n{output}")
    for name in unstable.unlisted(list(run.unstable), known):
        say(f"   docs/unstable.md does not list {name} yet")
    for name in summary.failures(run):
        say("\n".join([f"FAILED {name}", *summary.why(run, name)]))
    if run.unstable:
        say(f"{len(run.unstable)} unstable")
    say(f"\n{run.last_line()}")
    return 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
