"""Writes results with hardware, versions and commit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvline_contract import times

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "bench" / "results" / "results.jsonl"


def record(
    name: str,
    value: float,
    unit: str,
    spread: tuple[float, float],
    gpu: str | None = None,
    command: str = "",
) -> None:
    """Appends a result, of this benchmark or of the command that is given. KVLINE_BENCH_RESULTS and
    KVLINE_COMMIT set file and commit on a machine without the git history."""
    line = {
        "name": name,
        "value": round(value, 4),
        "unit": unit,
        "spread": [round(s, 4) for s in spread],
        "gpu": gpu or f"CPU {cpu()}",
        "versions": versions(gpu is not None),
        "commit": os.environ.get("KVLINE_COMMIT") or commit(),
        "command": command or "python bench " + " ".join(sys.argv[1:]),
        "date": times.now(),
    }
    path = Path(os.environ.get("KVLINE_BENCH_RESULTS", FILE))
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def commit() -> str:
    """The current commit, with -dirty when files other than results differ from it."""
    head = _git("rev-parse", "--short", "HEAD")
    changed = _git("status", "--porcelain", "--", ".", f":!{FILE.parent.relative_to(ROOT)}")
    return f"{head}-dirty" if changed else head


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def versions(gpu: bool) -> dict[str, str]:
    others = ("flashinfer-python", "triton") if gpu else ("transformers",)
    return {p: _version(p) for p in ("kvline", "torch", *others)}


def _version(package: str) -> str:
    """A checkout on PYTHONPATH has none; the commit says what it is."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def table(title: str, head: list[str], rows: list[list[str]]) -> None:
    print(f"\n{title}\n")
    widths = [max(len(str(r[i])) for r in [head, *rows]) for i in range(len(head))]
    for row in [head, ["-" * w for w in widths], *rows]:
        print("  " + "  ".join(str(c).ljust(w) for c, w in zip(row, widths, strict=True)))
    print(flush=True)


if __name__ == "__main__":  # for a program whose interpreter lacks kvline's packages
    kept = json.loads(sys.argv[1])
    record(**{**kept, "spread": (kept["value"], kept["value"])})
