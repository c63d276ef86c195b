"""What an image holds as a container sees it: sizes, NVIDIA's files, libraries that miss others."""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from contextlib import suppress
from pathlib import Path

from build import Built
from paths import ROOT

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
        added: Files = {}
        hidden = set()  # folders of lower layers
        for folder, folders, names in os.walk(layer.folder):
            at = Path(folder).relative_to(layer.folder)
            added.update((str(at / name), Path(folder, name)) for name in names)
            hidden |= {str(at / name) for name in folders if Path(folder, name).is_symlink()}
            hidden |= {str(at)} if _opaque(folder) else set()
        hidden |= added.keys()  # what is no folder hides one, and so does what marks it as deleted
        kept = {n: p for n, p in found.items() if hidden.isdisjoint(map(str, Path(n).parents))}
        found = kept | added
    return {name: path for name, path in found.items() if not _deleted(path)}


def _opaque(folder: str) -> bool:
    """Whether overlayfs shows nothing of a lower layer's folder below this one."""
    for name in ("trusted.overlay.opaque", "user.overlay.opaque"):
        with suppress(OSError):  # it has none
            return os.getxattr(folder, name) == b"y"
    return False


def _deleted(path: Path) -> bool:
    """How overlayfs marks it."""
    found = path.lstat()
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == 0


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


def outdated(found: Files) -> list[str]:
    """kvline's modules that are not this tree's: a builder may take a layer of an earlier build."""
    modules = {name.rpartition("site-packages/")[2]: path for name, path in found.items()}
    wrong = []
    for folder in (ROOT / "operator", ROOT / "server"):
        # But for kvline_image, which builds the image and is not in it.
        for path in sorted(folder.glob("kvline_[!i]*/**/*.py")):
            name = path.relative_to(folder).as_posix()
            there = modules.get(name)
            if there is None or there.read_bytes() != path.read_bytes():
                wrong.append(f"has another {name} than this tree")
    return wrong


def incomplete(found: Files) -> list[str]:
    """Shared libraries that name one which neither the image nor a node's driver has."""
    known = {name.rpartition("/")[2] for name in found} | DRIVER
    wrong = []
    for name, path in sorted(found.items()):
        if ".so" in path.name and stat.S_ISREG(path.lstat().st_mode) and elf.is_library(path):
            lost = set(elf.read(path).needs) - known
            wrong += [f"{name} needs {', '.join(sorted(lost))}"] if lost else []
    return wrong
