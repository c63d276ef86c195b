"""python tests/gpu_node/unpack.py PART...: puts packed parts into the cache of the local cluster.

Run on the machine with the GPU, with the Python that has torch; needs xz and tar, and no network.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests" / "cluster")]

import binaries  # noqa: E402
import node_programs  # noqa: E402
import parts  # noqa: E402
from errors import ClusterError  # noqa: E402
from paths import BIN as KUBE_BIN  # noqa: E402

# ip and nft are Debian's, with libraries of their own; what the machine has is not replaced.
WRAPPER = '#!/bin/sh\nLD_LIBRARY_PATH={lib} exec {program} "$@"\n'
KERNELS_OF = "flashinfer/data/aot"


def unpack(folders: list[Path], say: Callable[[str], None]) -> None:
    """All files at once. Raises ClusterError."""
    started = time.monotonic()
    missing = [str(folder) for folder in folders if not folder.is_dir()]
    if missing:
        raise ClusterError(f"there is no folder {', '.join(missing)}")
    files = {file.name: file for folder in folders for file in folder.iterdir()}
    unknown = set(files) - set(STEPS)
    if unknown or not files:
        names = ", ".join(sorted(unknown)) or ", ".join(map(str, folders)) or "nothing"
        raise ClusterError(f"parts of a GPU node hold {', '.join(STEPS)}; found {names}")
    with ThreadPoolExecutor() as pool:
        tasks = [pool.submit(STEPS[name], file) for name, file in files.items()]
    for task in tasks:
        task.result()
    if parts.SITE in files:
        prepare_packages()
    took = time.monotonic() - started
    say(f"unpacked {', '.join(sorted(files))} ({took:.1f} s)")
    if set(files) == set(STEPS):
        about = json.loads(files[parts.ABOUT].read_text())
        about |= {"seconds": took, "parts": parts.identity(list(files.values()))}
        node_programs.UNPACKED.write_text(json.dumps(about))


def kube(file: Path) -> None:
    KUBE_BIN.mkdir(parents=True, exist_ok=True)
    made = KUBE_BIN / ".kube"  # beside it: an older one may be running
    with made.open("wb") as out:
        _run(["xz", "-dc", str(file)], stdout=out)
    made.chmod(0o755)
    made.rename(KUBE_BIN / "kube")
    binaries.link_kubernetes()


def node(file: Path) -> None:
    _untar(file, node_programs.FOLDER)
    _move("pause", KUBE_BIN)
    node_programs.link()
    parts.WRAPPERS.mkdir(exist_ok=True)
    for name in ("ip", "nft"):
        wrapper = parts.WRAPPERS / name
        if wrapper.is_file() or shutil.which(name) is None:
            words = {"lib": parts.TOOLS / "lib", "program": parts.TOOLS / name}
            wrapper.write_text(WRAPPER.format(**words))
            wrapper.chmod(0o755)


def gpu(file: Path) -> None:
    _untar(file, node_programs.BIN)
    _move("coredns", KUBE_BIN)


def packages(file: Path) -> None:
    _untar(file, parts.PACKAGES)


def kernels(file: Path) -> None:
    _untar(file, parts.PACKAGES / KERNELS_OF)


def about(file: Path) -> None:
    if json.loads(file.read_text())["sources"] != node_programs.sources():
        raise ClusterError(f"{file.parent} was packed from other sources than this checkout has")


def cubins(file: Path) -> None:
    node_programs.FOLDER.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, node_programs.FOLDER / parts.CUBINS)


def prepare_packages() -> None:
    """Byte code, which read-only containers could not write, and rights for their users."""
    compiling = [sys.executable, "-m", "compileall", "-q", "-j", "0", str(parts.PACKAGES)]
    subprocess.run(compiling, capture_output=True, check=False)  # some files are templates
    _run(["chmod", "-R", "go+rX", str(parts.PACKAGES)])


STEPS: dict[str, Callable[[Path], None]] = {
    parts.KUBE: kube,
    parts.NODE: node,
    parts.GPU: gpu,
    parts.SITE: packages,
    parts.KERNELS: kernels,
    parts.CUBINS: cubins,
    parts.ABOUT: about,
}


def _untar(file: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    _run(["tar", "xJf", str(file), "-C", str(folder)])


def _move(name: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (node_programs.BIN / name).rename(folder / name)


def _run(command: list[str], stdout: object = subprocess.PIPE) -> None:
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)  # type: ignore[call-overload]
    if done.returncode:
        raise ClusterError(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")


def main() -> int:
    try:
        unpack([Path(word) for word in sys.argv[1:]], lambda text: print(text, flush=True))
    except ClusterError as error:
        print(f"unpack: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
