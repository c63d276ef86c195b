"""Packed parts become a cache that the cluster finds: with tiny stand-ins for the programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDERS = os.pathsep.join(map(str, (HERE, HERE.parent / "cluster")))
# What pack.py would have written, of this checkout's sources.
SOURCES = "import node_programs; print(node_programs.sources())"


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    files = {
        "node": ("bin/containerd", "bin/runc", "bin/pause", "cni/bridge", "tools/ip", "tools/nft"),
        "gpu": ("nvidia-device-plugin", "coredns"),
        "site": ("flashinfer/__init__.py",),
        "kernels": ("norm/norm.so",),
    }
    parts = {name: tmp_path / "parts" / name for name in "ab"}
    for part in parts.values():
        part.mkdir(parents=True)
    for name, inside in files.items():
        for file in inside:
            path = tree / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"#!/bin/sh\necho {path.name} $LD_LIBRARY_PATH\n")
            path.chmod(0o755)
        archive = parts["a" if name == "node" else "b"] / f"{name}.tar.xz"
        run("tar", "cJf", str(archive), "-C", str(tree / name), ".")
    (tmp_path / "kube").write_text("kube")
    with (parts["a"] / "kube.xz").open("wb") as out:
        subprocess.run(["xz", "-c", str(tmp_path / "kube")], stdout=out, check=True)
    (parts["b"] / "cubins.bin").write_bytes(b"cubins")
    about = {"sources": run(sys.executable, "-c", SOURCES, PYTHONPATH=FOLDERS).strip()}
    (parts["a"] / "about.json").write_text(json.dumps(about))
    return tmp_path / "parts"


def run(*command: str, **environment: str) -> str:
    made = {**os.environ, **environment}
    return subprocess.run(command, env=made, check=True, capture_output=True, text=True).stdout


def unpack(cache: Path, *folders: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / "unpack.py"), *map(str, folders)]
    # Nothing but Python, tar and xz: ip and nft are lacking.
    only = cache / "path"
    only.mkdir(parents=True, exist_ok=True)
    for name in ("tar", "xz", "chmod", "sh"):
        link = only / name
        if not link.exists():
            link.symlink_to(run("sh", "-c", f"command -v {name}").strip())
    environment = {**os.environ, "KVLINE_CACHE": str(cache), "PATH": str(only)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_all_parts_become_programs_packages_and_a_mark(packed: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    done = unpack(cache, packed / "a", packed / "b")
    assert done.returncode == 0, done.stderr
    assert (cache / "bin" / "kubelet").samefile(cache / "bin" / "kube")
    assert (cache / "bin" / "coredns").is_file() and (cache / "bin" / "pause").is_file()
    node = cache / "gpu-node"
    assert (node / "bin" / "ctr").samefile(node / "bin" / "containerd")
    assert (node / "site/flashinfer/data/aot/norm/norm.so").is_file()
    assert (node / "cubins.bin").read_bytes() == b"cubins"
    # A lacking program runs with libraries of its own, and nothing of the machine is replaced.
    assert run(str(node / "tools/bin/ip")) == f"ip {node}/tools/lib\n"
    assert json.loads((node / "unpacked.json").read_text())["seconds"] > 0
    assert unpack(cache, packed / "a", packed / "b").returncode == 0  # again, over it


def test_a_part_alone_is_no_node(packed: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert unpack(cache, packed / "a").returncode == 0
    assert not (cache / "gpu-node" / "unpacked.json").exists()


@pytest.mark.parametrize("wrong", ["nowhere", "foreign", "older"])
def test_what_is_no_part_is_named(packed: Path, tmp_path: Path, wrong: str) -> None:
    if wrong == "foreign":
        (packed / "a" / "notes.txt").write_text("?")
    if wrong == "older":
        (packed / "a" / "about.json").write_text('{"sources": "of another commit"}')
    folder = packed / "c" if wrong == "nowhere" else packed / "a"
    done = unpack(tmp_path / "cache", folder)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    named = {"nowhere": f"{packed}/c", "foreign": "notes.txt", "older": "other sources"}
    assert named[wrong] in done.stderr


def test_a_link_in_a_layer_never_leads_to_the_machine_s_files(tmp_path: Path) -> None:
    """Copied as it is, an absolute link in a layer leads out of it."""
    sys.path[:0] = [str(HERE), str(ROOT / "tests" / "cluster"), str(ROOT / "server")]
    from errors import ClusterError
    from machine_image import inside

    (tmp_path / "machine" / "triton").mkdir(parents=True)
    layer = tmp_path / "layer"
    (layer / "venv").mkdir(parents=True)
    (layer / "venv" / "lib").symlink_to(tmp_path / "machine")
    assert inside(layer, layer / "venv") == layer / "venv"
    with pytest.raises(ClusterError, match="leads out of the image"):
        inside(layer, layer / "venv" / "lib")
