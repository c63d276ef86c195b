"""Resolves pyproject.toml's extras and convert.in into hash-pinned files without index addresses:
all of them, or those that are named.

Releases younger than seven days are left out: a bad one is usually found by then.
"""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "cluster"))

import tools  # noqa: E402

COMMON = (
    "--universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate "
    "--no-header --quiet --upgrade"
)


def main() -> None:
    before = (datetime.now(UTC) - timedelta(days=7)).strftime("%Y-%m-%d")
    folder = ROOT / "requirements"
    sets = {"dev": ["pyproject.toml", "--extra", "dev"]}
    for image in ("operator", "server", "cuda"):  # traces are asked for by a chart value
        sets[image] = ["pyproject.toml", "--extra", image, "--extra", "otel"]
    for alone in ("convert", "lm-eval", "plot"):
        sets[alone] = [f"requirements/{alone}.in"]
    for name, source in sets.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        command = [tools.uv(), "pip", "compile", *source, *COMMON.split()]
        command += ["--constraint", "requirements/constraints.in", "--exclude-newer", before]
        made = folder / f"{name}.txt"
        subprocess.run([*command, "-o", str(made)], cwd=ROOT, check=True)
        if name == "server":
            made.write_text(without_gpu(made.read_text()))
        print(f"requirements/{name}.txt")


def without_gpu(requirements: str) -> str:
    """Without what torch requires for a GPU alone: the CPU's image has stubs instead."""
    packages = re.split(r"^(?=\S)", requirements, flags=re.M)
    return "".join(p for p in packages if not p.startswith(("nvidia-", "cuda-", "triton==")))


if __name__ == "__main__":
    main()
