"""What an image holds as a container sees it: sizes, NVIDIA's files, libraries that miss others."""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from pathlib import Path

from build import Built

from kvline_image import elf
from kvline_image.slim import DRIVER

MIB = 1 << 20
STUB_BYTES = 1 << 16
# NVIDIA's libraries and programs, and torch's part for GPUs.
GPU = re.compile(
    r"lib(cu(blas|dnn|fft|sparse|solver|rand|dart|pti|file)|nccl|nvrtc|nvJitLink|nvshmem|nvperf"
    r"|torch_cuda|torch_nvshmem|triton)\w*(\.alt)?\.(so|a)\b|ptxas|nvdisasm"
)

Files = dict[str, Path]  # path in the container -> the file of the layer that has it


def files(image: Built) -> Files:
    """An upper layer hides what is below it, so the last one that has a path decides."""
    found: Files = {}
    for layer in image.layers:
        for folder, _, names in os.walk(layer.folder):
            paths = (Path(folder, name) for name in names)
            found.update((str(p.relative_to(layer.folder)), p) for p in paths)
    return {name: path for name, path in found.items() if not _deleted(path)}


def _deleted(path: Path) -> bool:
    return stat.S_ISCHR(path.lstat().st_mode)  # how overlayfs marks it


def size(found: Files) -> int:
    return sum(path.lstat().st_size for path in found.values()) // MIB


def largest(found: Files, count: int = 9) -> str:
    """The packages, or folders of them, that take most of the space, in MiB."""
    sizes: Counter[str] = Counter()
    for name, path in found.items():
        inside = name.rpartition("site-packages/")[2]
        sizes["/".join(inside.split("/")[:2])] += path.lstat().st_size
    return ", ".join(f"{name} {n // MIB}" for name, n in sizes.most_common(count))


def layers(image: Built) -> str:
    """Their sizes in MiB, lowest first."""
    sizes = []
    for layer in image.layers:
        paths = (Path(folder, n) for folder, _, names in os.walk(layer.folder) for n in names)
        sizes.append(sum(path.lstat().st_size for path in paths) // MIB)
    return " + ".join(map(str, sizes))


def gpu_files(found: Files) -> list[str]:
    """Files of NVIDIA's that are more than stubs."""
    names = [name for name in found if GPU.match(name.rpartition("/")[2])]
    return sorted(name for name in names if found[name].lstat().st_size > STUB_BYTES)


def incomplete(found: Files) -> list[str]:
    """Shared libraries that name one which neither the image nor a node's driver has."""
    known = {name.rpartition("/")[2] for name in found} | DRIVER
    wrong = []
    for name, path in sorted(found.items()):
        if ".so" in path.name and stat.S_ISREG(path.lstat().st_mode) and elf.is_library(path):
            lost = set(elf.read(path).needs) - known
            wrong += [f"{name} needs {', '.join(sorted(lost))}"] if lost else []
    return wrong
