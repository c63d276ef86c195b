"""python -m kvline_image.slim SITE LIBRARY...: takes out of an installed torch what is never run.

PyPI's torch for Linux is the one for GPUs; its libraries name CUDA's, and the loader must find
each. LIBRARY... are those that are not there, or that this removes; in their place it puts stubs.
Another torch that names others is an error, and so is one that does not run a layer afterwards.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

from kvline_image import elf
from kvline_image.stub import stub

DRIVER = frozenset(["libcuda.so.1", "libnvidia-ml.so.1"])  # the node's, mounted into the container
LAYER = """
import torch
layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True).train(False)
with torch.inference_mode():
    out = layer(torch.randn(2, 8, 64))
assert out.shape == (2, 8, 64) and bool(out.isfinite().all())
torch.cuda.is_available()
"""


def main(site: Path, names: list[str]) -> None:
    folder = site / "torch" / "lib"
    for name in names:
        (folder / name).unlink(missing_ok=True)
    kept = [elf.read(p) for p in libraries(site)]
    missing = not_found(kept, names)
    if missing != set(names):
        raise SystemExit(f"slim: {sorted(missing)} are missing, {sorted(names)} are expected")
    symbols = lost_symbols(kept, names)
    for name in names:
        # Symbols without a version may be in any library; they are all in the first.
        own = [s for s in symbols if s.library == name or (not s.library and name == names[0])]
        (folder / name).write_bytes(stub(name, own))
    for path in libraries(folder):
        elf.strip(path)
    subprocess.run([sys.executable, "-c", LAYER], check=True)


def libraries(folder: Path) -> list[Path]:
    return [p for p in sorted(folder.rglob("*.so*")) if p.is_file() and elf.is_library(p)]


def not_found(kept: list[elf.Library], names: list[str]) -> set[str]:
    """Libraries that others name and that neither the folder nor the system has."""
    needed = {name for library in kept for name in library.needs}
    needed -= {library.name for library in kept} | DRIVER
    return {name for name in needed if name in names or not _loaded(name)}


def lost_symbols(kept: list[elf.Library], names: list[str]) -> list[elf.Symbol]:
    """Symbols that the libraries take, and that neither they nor the system's give."""
    needed = {name for library in kept for name in library.needs}.difference(names)
    system = [ctypes.CDLL(None), *(found for name in needed for found in _loaded(name))]
    given = {name for library in kept for name in library.gives}
    taken = {s for library in kept for s in library.takes if s.name not in given}
    return sorted(s for s in taken if not any(hasattr(found, s.name) for found in system))


def _loaded(name: str) -> list[ctypes.CDLL]:
    try:
        return [ctypes.CDLL(name)]
    except OSError:
        return []


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
