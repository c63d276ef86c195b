"""The house rules that a tool can measure: sizes of files and functions, forbidden calls, traps."""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = [ROOT / "operator", ROOT / "server", ROOT / "demo", ROOT / "tests" / "cluster"]


def source_files() -> list[Path]:
    return sorted(p for folder in SOURCE for p in folder.rglob("*.py"))


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(path.read_text())
    return [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def length(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


@pytest.mark.parametrize("path", source_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400
    long = [f"{f.name}: {length(f)}" for f in functions(path) if length(f) > 60]
    assert not long


def test_the_typical_file_and_function_is_short() -> None:
    files = [len(p.read_text().splitlines()) for p in source_files()]
    bodies = [length(f) for p in source_files() for f in functions(p)]
    assert statistics.median(files) <= 130
    assert statistics.median(bodies) <= 10


def test_operator_and_server_are_plain_folders() -> None:
    """An __init__.py there would shadow the standard library's operator module."""
    for name in ("operator", "server"):
        assert not list((ROOT / name).glob("*.py"))


@pytest.mark.parametrize(
    "pattern",
    [r"\bpickle\b", r"\bdill\b", r"torch\.load\(", r"recv_pyobj", r"\beval\(", r"\bexec\("],
)
def test_nothing_unpickles_or_runs_text(pattern: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in ("operator", "server")
        for path in (ROOT / folder).rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(pattern, line) and not re.search(r'"""|#|never', line)
    ]
    assert not found


def test_names_that_cross_the_border_stand_in_the_contract_alone() -> None:
    """No label, path or port of the contract is written out elsewhere."""
    literals = ("kvline.dev/service", "/etc/kvline", "/var/lib/kvline", "KVLINE_POD_UID")
    for path in source_files():
        if path.name == "names.py" or "demo" in path.parts or "cluster" in path.parts:
            continue
        code = "\n".join(
            line
            for line in path.read_text().splitlines()
            if not line.lstrip().startswith(("#", '"'))
        )
        assert not [text for text in literals if f'"{text}' in code], path


def test_no_registry_host_is_named_in_a_tracked_file() -> None:
    hosts = [
        "pypi" + ".org",
        "pythonhosted" + ".org",
        "proxy.golang" + ".org",
        "deb.debian" + ".org",
    ]
    listed = subprocess.run(
        ["git", "grep", "-lF", *(w for h in hosts for w in ("-e", h))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert listed.stdout == ""


def test_the_api_page_is_what_the_crd_says() -> None:
    import sys

    command = [sys.executable, str(ROOT / "docs" / "generate_api.py"), "--check"]
    assert subprocess.run(command, check=False).returncode == 0, "make api"


def test_the_charts_copies_are_of_their_sources() -> None:
    import helm

    for source, copy in helm.COPIES.items():
        assert (ROOT / source).read_text() == (ROOT / copy).read_text(), "make manifests"


def test_the_exit_codes_of_the_page_are_those_of_the_contract() -> None:
    from kvline_contract.exits import ExitCode

    page = (ROOT / "docs" / "operations.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (\w+) \| .+ \| (.+) \| (yes|no) \|$", page, re.M)
    expected = [
        (
            str(code),
            code.title,
            f"{code.condition} / {code.reason}" if code.condition else "-",
            "yes" if code.rejects else "no",
        )
        for code in ExitCode
    ]
    assert rows == expected


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize(
    ("package", "homes"),
    [
        (
            "flashinfer",
            (
                "kernels/gpu_rows.py",
                "kernels/gpu_sampling.py",
                "kernels/flashinfer_attention.py",
                "kernels/gpu_encoder.py",
                "kernels/library.py",
                "kernels/bf16_linear.py",
            ),
        ),
        (
            "triton",
            (
                "kernels/cubins.py",
                "kernels/triton_attention.py",
                "kernels/triton_cache.py",
                "kernels/triton_delta_rule.py",
                "kernels/triton_encoder.py",
                "kernels/triton_experts.py",
                "kernels/triton_fp8.py",
                "kernels/triton_kernels.py",
                "kernels/triton_mxfp4.py",
                "kernels/triton_recurrent.py",
                "kernels/triton_scan.py",
            ),
        ),
        ("cuda", ("memory/cuda.py", "kernels/cubins.py")),
    ],
)
def test_a_gpu_s_libraries_have_few_importers(package: str, homes: tuple[str, ...]) -> None:
    """The CPU's image has none of them, and a version of theirs is one file's business."""
    server = ROOT / "server" / "kvline_server"
    pattern = re.compile(rf"^\s*(import|from) {package}\b", re.M)
    found = {
        str(p.relative_to(server)) for p in server.rglob("*.py") if pattern.search(p.read_text())
    }
    assert found == set(homes)


def test_a_file_of_tests_that_others_import_has_a_name_of_its_own() -> None:
    """Folders of tests are on one path: the first file of the name would be taken for the other."""
    files = list((ROOT / "tests").rglob("*.py"))
    asked = re.compile(r"(?m)^from (test_\w+) import")
    names = {name for file in files for name in asked.findall(file.read_text())}
    shared = {
        name: count for name, count in Counter(file.stem for file in files).items() if count > 1
    }
    assert names and not names & shared.keys()
    bench = {file.stem for file in (ROOT / "bench").glob("[!_]*.py")}
    assert bench and not bench & {file.stem for file in files}
