"""make test: check, unit, process, integration, end-to-end. Ends with one line of what passed,
failed and was skipped, with the reason of each skip above it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import catalogue

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
PYTEST = [sys.executable, "-m", "pytest", "-q", "--no-header"]

TESTS = (
    "cluster",
    "conformance",
    "contract",
    "operator",
    "server",
    "integration",
    "e2e",
    "gpu",
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
ALWAYS = ("unit", "process")  # need no root, no cluster, no GPU
NOW = {"PYTHONUNBUFFERED": "1"}  # what is printed is seen
CLUSTERED = ("integration", "e2e")
STAGES = {
    "unit": ["-n", "2", "-m", "not process and not integration and not e2e and not gpu"],
    "process": ["-n", "2", "--dist", "loadfile", "-m", "process"],
    "integration": ["-n", "3", "-m", "integration"],  # mostly waits, each with its own cluster
    "e2e": ["-v", "-m", "e2e"],  # a line a test: some take minutes
}
# Two threads of torch in each of two workers wait for each other by spinning.
ENVIRONMENT = {"unit": {"OMP_NUM_THREADS": "1"}}


@dataclass
class Tally:
    passed: int = 0
    failed: int = 0
    skipped: int = 0


def main(wanted: list[str]) -> int:
    tally = Tally()
    if not wanted:
        catalogue.clear()
    if not wanted or "check" in wanted:
        check(tally)
    first = next((name for name in CLUSTERED if not wanted or name in wanted), None)
    for name, options in STAGES.items():
        if wanted and name not in wanted:
            continue
        if name == first:
            prepare(tally)
        stage(name, options, tally)
    if not wanted:
        catalogue.write()
    print(f"\n{tally.passed} passed, {tally.failed} failed, {tally.skipped} skipped")
    return 1 if tally.failed else 0


def check(tally: Tally) -> None:
    print("== check", flush=True)
    for name, command in CHECKS.items():
        started = time.monotonic()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        good = done.returncode == 0
        tally.passed += good
        tally.failed += not good
        verdict = "ok" if good else "FAILED"
        print(f"   {name:<24} {verdict} ({time.monotonic() - started:.1f} s)", flush=True)
        if not good:
            print(done.stdout[-6000:] + done.stderr[-2000:], flush=True)


def prepare(tally: Tally) -> None:
    """Programs, images and the model of the clusters, where they are not in the cache yet; without
    root the stage itself says why it runs nothing."""
    if os.geteuid() == 0:
        print("== what the clusters are made of", flush=True)
        done = subprocess.run([sys.executable, "tests/cluster", "build"], cwd=ROOT, check=False)
        tally.failed += int(done.returncode != 0)


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
