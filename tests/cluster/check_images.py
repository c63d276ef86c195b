"""make image-check [KERNELS=FILE]: what can be checked of the images without a cluster or a GPU.

No compiler, no package tool, no file that changes who runs it, a user that is not root, imports
that work as that user without a network, shared libraries that find those they name, and how large
it is at most. The CUDA image takes FlashInfer's kernels, built where nvcc is, from the archive that
KERNELS names; without one it is not checked.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import build
import contents
import lock
from build import BUILDAH, Built
from errors import ClusterError

UNWANTED = frozenset(
    [
        "gcc",
        "cc",
        "c++",
        "g++",
        "clang",
        "tcc",
        "as",
        "ld",
        "make",
        "cmake",
        "ninja",
        "nvcc",
        "ptxas",
        "cargo",
        "rustc",
        "go",
        "pip",
        "pip3",
        "uv",
    ]
)
FOLDERS = ("bin", "sbin", "usr/bin", "usr/sbin", "usr/local/bin", "opt/kvline/bin")
IMPORTS = {
    "operator": "kvline_operator.reconcile",
    "server": "kvline_server.engine_process.start, kvline_server.http.process, "
    "kvline_server.command.download",
}
IMPORTS[build.CUDA] = f"{IMPORTS['server']}, kvline_server.kernels.flashinfer"
# Everything that a start loads of FlashInfer, but for loading it, which needs a GPU.
KERNELS_ARE_THERE = (
    "from kvline_server.kernels.library import specs; "
    "missing = [s.name for s in specs() if not s.is_aot]; assert not missing, missing"
)
DRIVER = "/usr/local/nvidia/lib64"  # where GKE's nodes mount it
LIMITS = {"operator": 330, "server": 900, build.CUDA: 3050}  # MiB: what they take, and some more


def main() -> int:
    kernels = os.environ.get("KERNELS")
    try:
        images = build.build(print)
        if kernels:
            images += build_cuda(Path(kernels))
        else:
            print("the CUDA image is not checked: KERNELS names no archive of kernels")
    except ClusterError as error:
        print(f"image-check: {error}", file=sys.stderr)
        return 1
    wrong = [f"{image.name}: {what}" for image in images for what in check(image)]
    for line in wrong:
        print(f"  {line}", file=sys.stderr)
    return 1 if wrong else 0


def build_cuda(kernels: Path) -> list[Built]:
    with tempfile.TemporaryDirectory() as scratch:
        archive, cubins = Path(scratch, "kernels.tar.xz"), Path(scratch, "cubins.bin")
        shutil.copy(kernels, archive)
        command = [sys.executable, "-m", "kvline_server.kernels.build", str(cubins)]
        subprocess.run(command, check=True)
        return build.build(print, (build.CUDA,), archive, cubins)


def check(image: Built) -> list[str]:
    """What is wrong with an image; prints what it is."""
    files = contents.files(image)
    size, most = contents.size(files), LIMITS[image.component]
    user = str(image.config.get("User", ""))
    print(f"{image.name}: {size} MiB, user {user}")
    print(f"  layers, MiB: {contents.layers(image)}")
    print(f"  largest, MiB: {contents.largest(files)}", flush=True)
    wrong = [f"holds {name}" for name in sorted(files) if _unwanted(name)]
    wrong += [f"{name} is setuid or setgid" for name, p in sorted(files.items()) if _raised(p)]
    wrong += contents.incomplete(files)
    wrong += contents.outdated(files)
    if size > most:
        wrong.append(f"takes {size} MiB, at most {most} are expected")
    if image.component != build.CUDA:
        wrong += [f"holds {name}" for name in contents.gpu_files(files)]
    if user.partition(":")[0] in ("", "0", "root"):
        wrong.append(f"runs as {user or 'root'}")
    if image.component == build.CUDA and not any(DRIVER in e for e in image.config.get("Env", [])):
        wrong.append(f"finds no driver that a node mounts at {DRIVER}")
    with lock.held(build.STORE / "lock"):  # another build would remove the container
        return wrong + _imports(image)


def _unwanted(name: str) -> bool:
    folder, _, program = name.rpartition("/")
    return folder in FOLDERS and program in UNWANTED


def _raised(path: Path) -> bool:
    mode = path.lstat().st_mode
    return stat.S_ISREG(mode) and bool(mode & (stat.S_ISUID | stat.S_ISGID))


def _imports(image: Built) -> list[str]:
    """As the image's own user, without a network."""
    made = subprocess.run(
        [*BUILDAH, "from", image.name], capture_output=True, text=True, check=True
    )
    container = made.stdout.strip()
    code = f"import os, {IMPORTS[image.component]}; print(os.getuid())"
    if image.component == build.CUDA:
        code = f"{code}; {KERNELS_ARE_THERE}"
    words = ["run", "--isolation", "chroot", "--network", "host", "--env", "HOME=/tmp"]
    words += [container, "--"]
    try:
        done = subprocess.run(
            ["unshare", "--net", *BUILDAH, *words, "/opt/kvline/bin/python", "-c", code],
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        subprocess.run([*BUILDAH, "rm", container], capture_output=True, check=False)
    if done.returncode or done.stdout.strip() != "65532":
        return [f"imports as {json.dumps(done.stdout.strip())}: {done.stderr.strip()[-300:]}"]
    return []


if __name__ == "__main__":
    sys.exit(main())
