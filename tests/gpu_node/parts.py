"""The parts that bring a GPU node to a machine without a network: what they hold, their size.

`pack.py` makes them where a network is; `unpack.py` puts them into the cache of the cluster.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import node_programs

MIB = 1 << 20
BOUND = 60 * MIB  # of a part
KUBE, NODE, ABOUT = "kube.xz", "node.tar.xz", "about.json"
GPU, SITE, KERNELS, CUBINS = "gpu.tar.xz", "site.tar.xz", "kernels.tar.xz", "cubins.bin"
PARTS = {"a": (KUBE, NODE, ABOUT), "b": (GPU, SITE, KERNELS, CUBINS)}

# Python packages of operator and server that are beside the machine's torch.
PACKAGES = node_programs.FOLDER / "site"
TOOLS = node_programs.FOLDER / "tools"  # ip, nft and their libraries
WRAPPERS = TOOLS / "bin"  # of those that the machine lacks


def identity(files: list[Path]) -> str:
    """Changes when other parts are made."""
    named = sorted((file.name, file.stat().st_size) for file in files)
    return hashlib.sha256(repr(named).encode()).hexdigest()


def size(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
