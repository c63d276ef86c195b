"""make gpu-node: packs what a GPU node needs into build/gpu-node/, in two parts of at most 60 MiB.

KERNELS=FILE  FlashInfer's kernels, of `make kernels`
XZ=6          a faster packing than the usual 9e, for a try
PYTHON_OF_NODE=3.12  the version of the Python that has torch there

Everything is built here: the machine with the GPU may have no network, and needs no compiler. Torch
and what it brings are not packed: they are 3 GB, and the machine has its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests" / "cluster")]

import binaries  # noqa: E402
import node_programs  # noqa: E402
import parts  # noqa: E402
import tools  # noqa: E402
from errors import ClusterError  # noqa: E402
from node_programs import BIN, CNI  # noqa: E402
from paths import BIN as KUBE_BIN  # noqa: E402

OUT = ROOT / "build" / "gpu-node"
PRESET = os.environ.get("XZ", "9e")
PYTHON = os.environ.get("PYTHON_OF_NODE", "3.12")
PLATFORM = "x86_64-manylinux_2_39"  # what a machine with CUDA 13 can run
# Of the server's packages, those that a Python with torch and transformers lacks.
SERVER = (
    *("annotated-doc", "annotated-types", "anyio", "apache-tvm-ffi", "fastapi"),
    *("flashinfer-python", "h11", "httptools", "idna", "msgspec", "opentelemetry-api", "pydantic"),
    *("pydantic-core", "starlette", "typing-inspection", "uvicorn"),
)
# Of these packages, what nothing here imports.
UNUSED = ("kubernetes/aio", "kubernetes/docs", "flashinfer/data/cutlass")
LIBC = re.compile(r"/(libc|libm|libdl|libpthread|ld-linux[^/]*)\.so")


def say(line: str) -> None:
    print(f"   {line}", flush=True)


def main() -> int:
    started = time.monotonic()
    try:
        kernels = Path(os.environ.get("KERNELS", ROOT / "dist" / "kernels.tar.xz")).resolve()
        if not kernels.is_file():
            raise ClusterError(f"KERNELS={kernels}: there is no such file; make kernels makes it")
        build()
        with ThreadPoolExecutor() as pool:  # packing Kubernetes takes longest
            kube = pool.submit(pack_kube)
            pack_node()
            pack_gpu()
            pack_packages()
            pack_kernels(kernels)
            kube.result()
        for name, files in parts.PARTS.items():
            took = parts.size(OUT / name)
            say(f"part {name}: {took / parts.MIB:.1f} MiB ({', '.join(files)})")
            if took > parts.BOUND:
                raise ClusterError(f"part {name} has {took} bytes, of {parts.BOUND} allowed")
    except ClusterError as error:
        print(f"gpu-node: {error}", file=sys.stderr)
        return 1
    say(f"packed into {OUT.relative_to(ROOT)} ({time.monotonic() - started:.0f} s)")
    return 0


def _target(name: str) -> Path:
    part = next(part for part, files in parts.PARTS.items() if name in files)
    (OUT / part).mkdir(parents=True, exist_ok=True)
    return OUT / part / name


def build() -> None:
    if node_programs.UNPACKED.is_file():
        raise ClusterError(f"{node_programs.FOLDER} was unpacked here: parts are made elsewhere")
    binaries.build(say)
    node_programs.build(say, node_programs.NODE + node_programs.OF_NVIDIA)
    tools.ensure_packages(say, {"ip": "iproute2", "nft": "nftables", "xz": "xz-utils"})
    _target(parts.ABOUT).write_text(json.dumps({"sources": node_programs.sources()}))


def scratch() -> tempfile.TemporaryDirectory[str]:
    """Where the programs are, so that they can be linked."""
    return tempfile.TemporaryDirectory(dir=node_programs.FOLDER)


def pack_kube() -> None:
    started = time.monotonic()
    _xz(KUBE_BIN / "kube", parts.KUBE)
    say(f"packed Kubernetes ({time.monotonic() - started:.0f} s)")


def pack_node() -> None:
    with scratch() as folder:
        tree = Path(folder)
        for name in ("bin", "cni", "tools/lib"):
            (tree / name).mkdir(parents=True)
        wanted = ("containerd", "containerd-shim-runc-v2", "runc", node_programs.PLUGIN)
        for name in wanted:
            (tree / "bin" / name).hardlink_to(BIN / name)
        shutil.copy(KUBE_BIN / "pause", tree / "bin")
        for path in CNI.iterdir():
            (tree / "cni" / path.name).hardlink_to(path)
        for name in ("ip", "nft"):
            _with_libraries(name, tree / "tools")
        _tar(tree, parts.NODE)


def _with_libraries(name: str, folder: Path) -> None:
    """A program of this machine and the libraries that another may lack, the C library aside."""
    program = shutil.which(name)
    if program is None:
        raise ClusterError(f"{name} is not on the PATH")
    shutil.copy(program, folder)
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    for library in re.findall(r"=> (\S+)", listed):
        if not LIBC.search(library):
            shutil.copy(library, folder / "lib")


def pack_gpu() -> None:
    with scratch() as folder:
        for name in (node_programs.NVIDIA_PLUGIN, node_programs.NVIDIA_HOOK):
            Path(folder, name).hardlink_to(BIN / name)
        shutil.copy(KUBE_BIN / "coredns", folder)
        _tar(Path(folder), parts.GPU)


def pack_packages() -> None:
    """The locked Python packages, for the Python of the machine with the GPU."""
    with scratch() as folder:
        wanted = Path(folder, "requirements.txt")
        operator = (ROOT / "requirements" / "operator.txt").read_text()
        server = _locked(ROOT / "requirements" / "cuda.txt", SERVER)
        # Both locks have the packages that both use, at one version.
        entries = {e.split("==")[0]: e for e in [*_entries(operator), *server]}
        wanted.write_text("\n".join(entries.values()) + "\n")
        tree = Path(folder, "site")
        tools.run_uv(
            *("pip", "install", "--quiet", "--target", str(tree), "--python-version", PYTHON),
            *("--python-platform", PLATFORM, "--no-deps", "--only-binary=:all:"),
            *("--require-hashes", "--requirements", str(wanted), "--link-mode=copy"),
        )
        for name in UNUSED:
            shutil.rmtree(tree / name, ignore_errors=True)
        _tar(tree, parts.SITE)


def _entries(text: str) -> list[str]:
    """The entries of a lock, each with its hashes."""
    return [e for e in re.split(r"\n(?=[a-z])", text.strip()) if e]


def _locked(lock: Path, names: tuple[str, ...]) -> list[str]:
    found = {e.split("==")[0]: e for e in _entries(lock.read_text())}
    missing = [name for name in names if name not in found]
    if missing:
        raise ClusterError(f"{lock.name} does not lock {', '.join(missing)}")
    return [found[name] for name in names]


def pack_kernels(kernels: Path) -> None:
    shutil.copy(kernels, _target(parts.KERNELS))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "server")}
    command = [sys.executable, "-m", "kvline_server.kernels.build", str(_target(parts.CUBINS))]
    subprocess.run(command, env=environment, check=True)


def _tar(tree: Path, name: str) -> None:
    words = ["tar", "c", "--sort=name", "--owner=0", "--group=0", "-C", str(tree), "."]
    _compress(subprocess.Popen(words, stdout=subprocess.PIPE).stdout, name, "64MiB")


def _xz(program: Path, name: str) -> None:
    with program.open("rb") as source:
        _compress(source, name, "192MiB")


def _compress(source: object, name: str, dictionary: str) -> None:
    """With the filter for machine code, which most of these files are."""
    with _target(name).open("wb") as out:
        words = ["xz", "-c", "--x86", f"--lzma2=preset={PRESET},dict={dictionary}"]
        subprocess.run(words, stdin=source, stdout=out, check=True)  # type: ignore[call-overload]


if __name__ == "__main__":
    sys.exit(main())
