"""Resolves pyproject.toml's extras and convert.in into hash-pinned files without index addresses:
all of them, or those that are named, and with `npm` each package-lock.json of the clients for
Node.js. Then prints what is newer today than the bounds allow.

Releases younger than seven days are left out: a bad one is usually found by then. dates.txt has the
last day whose releases each file knows.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / name) for name in ("cluster", "clients")]

import environments  # noqa: E402
import tools  # noqa: E402

FOLDER = ROOT / "requirements"
DATES = FOLDER / "dates.txt"
UNIVERSAL = "--universal --python-version 3.11 --no-annotate --no-header --quiet"
COMMON = f"{UNIVERSAL} --generate-hashes --no-emit-index-url --upgrade"


def main() -> None:
    before = (datetime.now(UTC) - timedelta(days=7)).strftime("%Y-%m-%d")
    sets = {"dev": ["pyproject.toml", "--extra", "dev"]}
    for image in ("operator", "server", "cuda"):  # traces are asked for by a chart value
        sets[image] = ["pyproject.toml", "--extra", image, "--extra", "otel", "--extra", "image"]
    for alone in sorted(FOLDER.glob("*.in")):
        if alone.stem != "constraints":
            sets[alone.stem] = [f"requirements/{alone.name}"]
    for name, source in sets.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        command = [tools.uv(), "pip", "compile", *source, *COMMON.split()]
        command += ["--constraint", "requirements/constraints.in", "--exclude-newer", before]
        made = FOLDER / f"{name}.txt"
        subprocess.run([*command, "-o", str(made)], cwd=ROOT, check=True)
        if name == "server":
            made.write_text(without_gpu(made.read_text()))
        dates = dict(line.split() for line in DATES.read_text().splitlines()) | {name: before}
        DATES.write_text("".join(f"{n} {day}\n" for n, day in sorted(dates.items())))
        print(f"requirements/{name}.txt")
    if not sys.argv[1:] or "npm" in sys.argv[1:]:
        environments.lock(before, print)
    for line in beyond(ROOT / "pyproject.toml"):
        print(f"newer than pyproject.toml allows: {line}")


def without_gpu(requirements: str) -> str:
    """Without what torch requires for a GPU alone: the CPU's image has stubs instead."""
    packages = re.split(r"^(?=\S)", requirements, flags=re.M)
    return "".join(p for p in packages if not p.startswith(("nvidia-", "cuda-", "triton==")))


def beyond(project: Path) -> list[str]:
    """The newest release of each requirement that its bound leaves out, as name==version."""
    wanted = declared(tomllib.loads(project.read_text()))
    return sorted(_newest(map(unbounded, wanted)) - _newest(wanted))


def declared(project: dict[str, Any]) -> set[str]:
    """Those of every extra and of the build; the extras' names for each other are none."""
    extras = project["project"]["optional-dependencies"].values()
    every = {*project["build-system"]["requires"], *(each for extra in extras for each in extra)}
    return {each for each in every if not each.startswith("kvline[")}


def unbounded(requirement: str) -> str:
    """The name alone."""
    return re.split(r"[<>=!~;\s]", requirement)[0]


def _newest(wanted: Iterable[str]) -> set[str]:
    """Today's newest releases, each without regard to what the others require."""
    command = [tools.uv(), "pip", "compile", "-", "--no-deps", *UNIVERSAL.split()]
    lines = "\n".join(sorted(wanted))
    done = subprocess.run(command, input=lines, stdout=subprocess.PIPE, text=True, check=True)
    return set(done.stdout.splitlines())


if __name__ == "__main__":
    main()
