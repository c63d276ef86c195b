"""What needs no test run: format, lint, types, imports."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stages import say

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
TESTS = (
    "clients",
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
    "suite",
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


def run() -> dict[str, bool]:
    """Whether each passed."""
    say("== check")
    names = list(CHECKS)
    with ThreadPoolExecutor(HALVES) as pool:
        halves = [pool.submit(_some, names[i::HALVES], f".mypy_cache/{i}") for i in range(HALVES)]
    return {name: passed for half in halves for name, passed in half.result().items()}


def _some(names: list[str], cache: str) -> dict[str, bool]:
    return {name: _passes(name, {**os.environ, "MYPY_CACHE_DIR": cache}) for name in names}


def _passes(name: str, environment: dict[str, str]) -> bool:
    started = time.monotonic()
    done = subprocess.run(
        CHECKS[name], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    good = done.returncode == 0
    text = f"   {name:<24} {'ok' if good else 'FAILED'} ({time.monotonic() - started:.1f} s)"
    say(text + ("" if good else "\n" + done.stdout[-6000:] + done.stderr[-2000:]))
    return good
