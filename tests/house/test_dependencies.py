"""What pyproject.toml lets pip install: nothing above what the locks have seen, and each package
that the code imports by name."""

from __future__ import annotations

import ast
import re
import runpy
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
LOCK: dict[str, Any] = runpy.run_path(str(ROOT / "requirements" / "lock.py"))
DECLARED = sorted(LOCK["declared"](PROJECT))
# Past 1.0, and a minor may change what is used here: docs/decisions/001 says what.
MINORS_BREAK = {"jinja2", "numpy", "pydantic", "torch", "transformers"}
# What an extra's files import, beside the standard library and each other.
IMPORTERS = [
    ("operator/kvline_operator", ["operator", "otel"]),
    ("operator/kvline_kubectl", ["kubectl"]),
    ("server/kvline_server", ["server", "cuda", "otel"]),
    ("server/kvline_contract", ["otel"]),
]
HOMES = {  # where it is another than the module's own package, or none that dev installs
    "cuda": "cuda-bindings",
    "flashinfer": "flashinfer-python",
    "markupsafe": "jinja2",  # requires it
    "pydantic_core": "pydantic",  # requires one version of it
    "pynvml": "flashinfer-python",  # it may be missing
    "triton": "torch",  # requires one version of it
}


def locked() -> dict[str, list[Version]]:
    """Every version of a package in any of the locks of an extra."""
    found: dict[str, list[Version]] = {}
    for name in ("cuda", "dev", "operator", "server"):
        text = (ROOT / "requirements" / f"{name}.txt").read_text()
        for package, version in re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.M):
            found.setdefault(package, []).append(Version(version))
    return found


def first_unseen(requirement: Requirement, newest: Version) -> str:
    """The lowest version that may break: the next minor's or the next major's."""
    if newest.major == 0 or requirement.name in MINORS_BREAK:
        return f"{newest.major}.{newest.minor + 1}"
    return f"{newest.major + 1}"


@pytest.mark.parametrize("text", DECLARED)
def test_a_release_that_no_lock_has_seen_is_not_installed(text: str) -> None:
    """A new torch ended each `kvline-server size` of a fresh install."""
    requirement = Requirement(text)
    bounds = {clause.operator: clause.version for clause in requirement.specifier}
    versions = locked().get(requirement.name, [])
    outside = [str(v) for v in versions if v not in requirement.specifier]
    assert not outside, f"{text}: a lock has {outside}; make lock"
    if "==" in bounds:
        return
    if not versions:  # it builds the package, and no lock has it
        assert "<" in bounds, f"{text} has no upper bound"
        return
    unseen = first_unseen(requirement, max(versions))
    assert bounds.get("<") == unseen, f"{text}: the locks have {max(versions)}; expected <{unseen}"


def imported(folder: Path) -> set[str]:
    """Top-level modules that its files import anywhere."""
    found: set[str] = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.split(".")[0])
    return {m for m in found if m not in sys.stdlib_module_names and not m.startswith("kvline_")}


@pytest.mark.parametrize(("folder", "extras"), IMPORTERS, ids=[f for f, _ in IMPORTERS])
def test_what_is_imported_is_declared(folder: str, extras: list[str]) -> None:
    """What another package brings along has no bound of ours."""
    declared = {Requirement(text).name for extra in extras for text in EXTRAS[extra]}
    distributions = packages_distributions()
    modules = imported(ROOT / folder)
    assert modules
    for module in modules:
        names = [HOMES[module]] if module in HOMES else distributions.get(module, [])
        homes = {canonicalize_name(name) for name in names}
        assert homes & declared, f"{module}, of {homes or 'no package'}, is not in {extras}"
