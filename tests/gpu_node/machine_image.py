"""Images of the machine's own system and torch, where the shipped ones do not fit what travels.

The layers stand for those of server/cuda.Dockerfile: a system, torch with CUDA (without Triton, as
there), other packages with the prebuilt kernels, kvline. All are hard links, so they must be on one
file system, and an image is there in seconds. Versions are the machine's, not those of the lock.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import build
import node_programs
import parts
from errors import ClusterError
from images import Images, link_tree
from paths import ROOT

SITE = Path("opt/kvline/site")  # in the image
KVLINE = node_programs.FOLDER / "kvline"
# Where the driver's files would be if this machine's toolkit had put them there: an image that
# brings them would hide that a node does not.
DRIVER_FILES = ("libcuda*.so*", "libnvidia-*.so*", "libnvcuvid*", "nvidia-*")
SOURCES = (
    *("operator/kvline_operator", "operator/kvline_kubectl"),
    *("server/kvline_server", "server/kvline_contract"),
)
LIBRARIES = "/usr/local/lib\n/lib/x86_64-linux-gnu\n/usr/lib/x86_64-linux-gnu\n"
ENVIRONMENT = (
    f"PYTHONPATH=/{SITE}/kvline:/{SITE}/packages",
    "PYTHONDONTWRITEBYTECODE=1",
    "PYTHONUNBUFFERED=1",
    "FLASHINFER_DISABLE_JIT=1",
    "FLASHINFER_CUDA_ARCH_LIST=9.0a",
    # As server/cuda.Dockerfile: where nodes without a container toolkit mount the driver.
    "LD_LIBRARY_PATH=/usr/local/nvidia/lib64:/usr/local/nvidia/lib",
)
CACHES = shutil.ignore_patterns("__pycache__")
MODULES = {"operator": "kvline_operator", "server": "kvline_server", build.CUDA: "kvline_server"}


def add(images: Images, wanted: dict[str, str]) -> None:
    """Adds images, component -> name; they differ in what they start."""
    python = environment()
    layers: tuple[tuple[str, Callable[[Path], None]], ...] = (
        (f"system {_age('/var/lib/dpkg/status')}", _system),
        (f"python {python} {_age(packages_of_torch())}", lambda f: _python(f, python)),
        (
            f"packages {_age(parts.PACKAGES)}",
            lambda folder: link(parts.PACKAGES, folder / SITE / "packages"),
        ),
        (f"kvline {wanted['server']} {_own()}", lambda folder: _kvline(folder, python)),
    )
    chain, diff_ids = "", []
    for key, fill in layers:
        diff_ids.append("sha256:" + hashlib.sha256(key.encode()).hexdigest())
        chain = images.add_layer(diff_ids[-1], chain, fill)
    for component, name in wanted.items():
        entry = [f"{python}/bin/python3", "-m", MODULES[component.partition("-")[0]]]
        path = f"PATH={python}/bin:/usr/local/bin:/usr/bin:/bin"
        config = {"Entrypoint": entry, "User": "65532:65532", "Env": [path, *ENVIRONMENT]}
        images.define(name, config, diff_ids)


def _age(path: str | Path) -> int:
    """When a folder or file changed last; a layer of it is made again then."""
    return Path(path).stat().st_mtime_ns if Path(path).exists() else 0


def _own() -> str:
    """Changes with what the last layer has beside the server's code."""
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    return f"{digest[:12]} {_age(node_programs.FOLDER / parts.CUBINS)}"


def environment() -> Path:
    """The folder of the Python environment that runs this, and has torch."""
    return Path(sys.prefix)


def link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.mkdir(exist_ok=True)
    link_tree(f"{source}/.", target)


def _system(folder: Path) -> None:
    """The machine's programs and libraries, without its knowledge of the driver."""
    for name in ("opt", "proc", "sys", "dev", "run", "root", "var/tmp", "tmp", "etc/ld.so.conf.d"):
        (folder / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        if Path("/usr", name).is_dir():
            link(Path("/usr", name), folder / "usr" / name)
        if Path("/", name).is_symlink():
            (folder / name).symlink_to(os.readlink(f"/{name}"))
        elif Path("/", name).is_dir():
            link(Path("/", name), folder / name)
    for place in ("usr/lib", "usr/lib/x86_64-linux-gnu", "usr/bin"):
        for pattern in DRIVER_FILES:
            for path in inside(folder, folder / place).glob(pattern):
                if not path.is_dir():
                    path.unlink()
    (folder / "tmp").chmod(0o1777)
    for file, text in {
        "passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/:/usr/sbin/nologin\n",
        "group": "root:x:0:\nnogroup:x:65534:\n",
        "nsswitch.conf": "hosts: files dns\n",
        "ld.so.conf": "include /etc/ld.so.conf.d/*.conf\n",
        "ld.so.conf.d/libraries.conf": LIBRARIES,
    }.items():
        (folder / "etc" / file).write_text(text)
    subprocess.run(["ldconfig", "-r", str(folder)], check=True, capture_output=True)
    folder.chmod(0o755)


def _python(folder: Path, python: Path) -> None:
    """The environment, and the Python that it is made with where that is no part of the system."""
    linked = [Path("/usr/lib")]
    for place in {python, Path(sys.base_prefix)} - {Path("/usr")}:
        # /usr/local may have a driver and whole toolkits beside a Python.
        found = (place / "bin", place / "lib") if place == Path("/usr/local") else (place,)
        for part in found:
            link(part, folder / part.relative_to("/"))
            linked.append(part)
    site = packages_of_torch()
    if not any(site.is_relative_to(place) for place in linked):
        link(site, folder / site.relative_to("/"))
    shutil.rmtree(inside(folder, folder / site.relative_to("/")) / "triton", ignore_errors=True)


def inside(folder: Path, path: Path) -> Path:
    """The real path of a folder of a layer: a link in it may lead to the machine's own files, which
    must not be deleted. Raises ClusterError."""
    real = path.resolve()
    if not real.is_relative_to(folder.resolve()):
        raise ClusterError(f"{path.relative_to(folder)} leads out of the image: {real}")
    return real


def packages_of_torch() -> Path:
    """The folder that has torch. Raises ClusterError where this Python has none."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise ClusterError(f"{sys.executable} has no torch, which the images are made of")
    return Path(found.origin).parents[1]


def _kvline(folder: Path, python: Path) -> None:
    link(make_kvline(), folder / SITE / "kvline")
    (folder / "opt/kvline/bin").mkdir()
    (folder / "opt/kvline/bin/python").symlink_to(python / "bin" / "python3")  # as shipped images


def make_kvline() -> Path:
    """kvline's own packages with their cubins, as the CUDA image has them."""
    target = KVLINE
    shutil.rmtree(target, ignore_errors=True)
    for name in SOURCES:
        shutil.copytree(ROOT / name, target / Path(name).name, ignore=CACHES)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    about = target / f"kvline-{project['version']}.dist-info"  # of which kvline reads its version
    about.mkdir()
    text = f"Metadata-Version: 2.1\nName: kvline\nVersion: {project['version']}\n"
    (about / "METADATA").write_text(text)
    cubins = node_programs.FOLDER / parts.CUBINS
    if cubins.is_file():
        shutil.copy(cubins, target / "kvline_server" / "kernels")
    compiling = [sys.executable, "-m", "compileall", "-q", str(target)]
    subprocess.run(compiling, check=True, capture_output=True)
    subprocess.run(["chmod", "-R", "go+rX", str(target)], check=True)
    return target
