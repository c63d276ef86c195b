"""make test: check, unit, process, integration, end-to-end. Ends with one line of what passed,
failed and was skipped, with the reason of each skip above it.

What the clusters are made of is built meanwhile, at the lowest priority.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import catalogue

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
PYTEST = [sys.executable, "-m", "pytest", "-q", "--no-header"]
PYTEST += ["--durations=10", "--durations-min=10"]  # what to shorten first

TESTS = (
    "cluster",
    "conformance",
    "contract",
    "operator",
    "server",
    "integration",
    "e2e",
    "gpu",
    "gpu_node",
    "demo",
    "house",
)
TYPED = ["operator server", "demo", "bench", *(f"tests/{name}" for name in TESTS)]
CHECKS = {
    "format": [f"{BIN}/ruff", "format", "--check", "--quiet", "."],
    "lint": [f"{BIN}/ruff", "check", "--quiet", "."],
    # Folder by folder: some hold files of the same name.
    **{f"types: {folder}": [f"{BIN}/mypy", *folder.split()] for folder in TYPED},
    "imports": [f"{BIN}/lint-imports", "--no-logo"],
}
HALVES = 2  # of the checks, at once; mypy's cache is for one process at a time
ALWAYS = ("unit", "process")  # need no root, no cluster, no GPU
NOW = {"PYTHONUNBUFFERED": "1"}  # what is printed is seen
CLUSTERED = ("integration", "e2e", "recipes", "rehearsal")
STAGES = {
    "unit": ["-n", "2", "-m", "not (process or integration or e2e or recipe or rehearsal or gpu)"],
    "process": ["-n", "2", "--dist", "loadfile", "-m", "process"],
    # Each worker has a cluster. Tests often wait for it, so three share two cores.
    "integration": ["-n", "3", "-m", "integration", "tests/integration"],
    "e2e": ["-v", "-m", "e2e", "tests/e2e"],  # a line a test: some take minutes
    # Only where named: Prometheus and its adapter take minutes to build.
    "recipes": ["-v", "-m", "recipe", "tests/e2e"],
    "rehearsal": ["-s", "-m", "rehearsal", "tests/demo"],  # what it prints is the demo
}
BY_NAME = ("recipes", "rehearsal")
# Two threads of torch in each of two workers wait for each other by spinning.
ENVIRONMENT = {"unit": {"OMP_NUM_THREADS": "1"}}


@dataclass
class Tally:
    passed: int = 0
    failed: int = 0
    skipped: int = 0


def main(wanted: list[str]) -> int:
    # A shell's background jobs ignore it, and so would the programs that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    tally = Tally()
    stages = [name for name in STAGES if name in wanted or not (wanted or name in BY_NAME)]
    first = next((name for name in stages if name in CLUSTERED), None)
    building = build() if first else None
    if not wanted:
        catalogue.clear()
    if not wanted or "check" in wanted:
        check(tally)
    for name in stages:
        if name == first and building is not None:
            built(building, tally)
        stage(name, STAGES[name], tally)
    if not wanted:
        catalogue.write()
    print(f"\n{tally.passed} passed, {tally.failed} failed, {tally.skipped} skipped")
    return 1 if tally.failed else 0


def check(tally: Tally) -> None:
    print("== check", flush=True)
    names = list(CHECKS)
    with ThreadPoolExecutor(HALVES) as pool:
        halves = [pool.submit(checked, names[i::HALVES], f".mypy_cache/{i}") for i in range(HALVES)]
    for passed in [good for half in halves for good in half.result()]:
        tally.passed += passed
        tally.failed += not passed


def checked(names: list[str], cache: str) -> list[bool]:
    return [passes(name, {**os.environ, "MYPY_CACHE_DIR": cache}) for name in names]


def passes(name: str, environment: dict[str, str]) -> bool:
    started = time.monotonic()
    done = subprocess.run(
        CHECKS[name], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    good = done.returncode == 0
    text = f"   {name:<24} {'ok' if good else 'FAILED'} ({time.monotonic() - started:.1f} s)\n"
    print(text + ("" if good else done.stdout[-6000:] + done.stderr[-2000:]), end="", flush=True)
    return good


def build() -> subprocess.Popen[str] | None:
    """Starts to build programs, images and the model of the clusters, where they are not in the
    cache yet; without root the stage itself says why it runs nothing."""
    if os.geteuid() != 0:
        return None
    command = ["nice", "-n", "19", sys.executable, "tests/cluster", "build"]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def built(building: subprocess.Popen[str], tally: Tally) -> None:
    """Waits for the build, and shows what it has done and does."""
    print("== what the clusters are made of", flush=True)
    assert building.stdout is not None
    for line in building.stdout:
        print(line, end="", flush=True)
    tally.failed += int(building.wait() != 0)


def stage(name: str, options: list[str], tally: Tally) -> None:
    """One pytest run, shown as it goes; its closing line is added to the tally."""
    print(f"== {name}", flush=True)
    started = time.monotonic()
    process = subprocess.Popen(
        [*PYTEST, *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={
            **os.environ,
            **NOW,
            **ENVIRONMENT.get(name, {}),
            "TOKENIZERS_PARALLELISM": "false",
            "KVLINE_STAGE": name,
        },
    )
    assert process.stdout is not None
    last = ""
    for line in process.stdout:
        print(line, end="", flush=True)
        last = line if re.search(r"\d+ (passed|failed|skipped|error)", line) else last
    code = process.wait()
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", last)}
    tally.passed += counts.get("passed", 0)
    tally.skipped += counts.get("skipped", 0)
    failures = counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)
    if not counts.get("passed") and name in ALWAYS:
        print(f"   {name}: nothing passed, which no machine excuses", flush=True)
        failures = failures or 1
    tally.failed += failures or int(code not in (0, 5))
    print(f"   {name} took {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
