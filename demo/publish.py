"""make images REGISTRY=host/path: builds the shipped images and pushes them; prints how to install.

KERNELS=FILE     also the CUDA image, with FlashInfer's kernels (`make kernels`, where nvcc is)
BUILDER=WORDS    docker, podman or buildah, with options of its own; else the first on the PATH
BUILD_WORDS=...  more words for its `build`, such as --secret id=registry,src=FILE
BASE=IMAGE       the image to build on, where the usual one cannot be pulled
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "cluster")]

import build  # noqa: E402
import tools  # noqa: E402
from errors import ClusterError  # noqa: E402

Say = Callable[[str], None]
BUILDERS = ("docker", "podman", "buildah")
CUBINS = ROOT / "dist" / "cubins.bin"


def builder() -> list[str]:
    """The program that builds and pushes, with its first arguments. Raises ClusterError."""
    words = shlex.split(os.environ.get("BUILDER", ""))
    found = words or [name for name in BUILDERS if shutil.which(name)][:1]
    if not found or shutil.which(found[0]) is None:
        wanted = words[0] if words else ", ".join(BUILDERS)
        raise ClusterError(f"images are built with one of {wanted}: none is on the PATH")
    return found


def names(registry: str, kernels: Path | None = None) -> dict[str, str]:
    """component -> image name in the registry, with its content hash as tag."""
    components = (*build.COMPONENTS, *([build.CUDA] if kernels else []))
    return {c: build.image_name(c).replace("localhost", registry, 1) for c in components}


def publish(registry: str, kernels: Path | None, say: Say) -> dict[str, str]:
    """Builds and pushes; component -> image name with its digest in the registry."""
    program = builder()
    _context(kernels)
    pushed = {}
    for component, name in names(registry, kernels).items():
        _build(program, component, name, say)
        pushed[component] = f"{name.rpartition(':')[0]}@{_push(program, name)}"
        say(f"pushed {pushed[component]}")
    return pushed


def load(into: list[str], say: Say) -> None:
    """Builds, and runs the command `into` with a file that has the image, for each: images of a
    cluster that has no registry to pull from."""
    program = builder()
    _context(None)
    with tempfile.TemporaryDirectory() as folder:
        for component, name in names("localhost").items():
            _build(program, component, name, say)
            file = f"{folder}/{component}.tar"
            if "buildah" in Path(program[0]).name:
                _run([*program, "push", "--quiet", name, f"docker-archive:{file}:{name}"])
            else:
                _run([*program, "save", "-o", file, name])
            say(f"{' '.join(into)} {file}")
            _run([*into, file])


def _build(program: list[str], component: str, name: str, say: Say) -> None:
    say(f"{program[0]} build {name}")
    base = ["--build-arg", f"BASE={os.environ['BASE']}"] if os.environ.get("BASE") else []
    more = shlex.split(os.environ.get("BUILD_WORDS", ""))
    _run([*program, "build", *base, *more, "-f", build.dockerfile(component), "-t", name, "."])


def _context(kernels: Path | None) -> None:
    """dist/: this tree's wheel, and for CUDA the kernels beside it."""
    if kernels is not None and not kernels.is_file():
        raise ClusterError(f"KERNELS={kernels}: there is no such file; make kernels makes it")
    if kernels is not None and not CUBINS.is_file():
        raise ClusterError(f"{CUBINS.relative_to(ROOT)} is missing: make cubins")
    for old in (ROOT / "dist").glob("*.whl"):
        old.unlink()
    tools.run_uv("build", "--quiet", "--wheel", "--out-dir", "dist", ".")
    if kernels is not None and kernels.resolve() != ROOT / "dist" / "kernels.tar.xz":
        shutil.copy(kernels, ROOT / "dist" / "kernels.tar.xz")


def _push(program: list[str], name: str) -> str:
    if "docker" in Path(program[0]).name:
        _run([*program, "push", "--quiet", name])
        about = [*program, "image", "inspect", "--format", "{{index .RepoDigests 0}}", name]
        return _run(about).rpartition("@")[2].strip()
    with tempfile.NamedTemporaryFile("r") as digest:
        _run([*program, "push", "--quiet", "--digestfile", digest.name, name])
        return Path(digest.name).read_text().strip()


def _run(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        output = (done.stderr or done.stdout).strip()[-1500:]
        raise ClusterError(f"{' '.join(command)[:160]}: {output}")
    return done.stdout


def main() -> int:
    registry = os.environ.get("REGISTRY", "").rstrip("/")
    kernels = Path(os.environ["KERNELS"]) if os.environ.get("KERNELS") else None
    try:
        if not registry:
            raise ClusterError("REGISTRY=host/path names where the cluster pulls images from")
        pushed = publish(registry, kernels, lambda text: print(text, flush=True))
    except ClusterError as error:
        print(f"images: {error}", file=sys.stderr)
        return 1
    values = {"operator": "operator", "server": "server", build.CUDA: "cuda"}
    words = [f"--set image.{values[c]}={name}" for c, name in pushed.items()]
    print("\nhelm install kvline-crds charts/kvline-crds -n kvline-system --create-namespace")
    print("helm install kvline charts/kvline -n kvline-system", *words, sep=" \\\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
