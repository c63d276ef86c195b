"""Builds the shipped Dockerfiles with buildah, on a base from debootstrap, once a change.

There is no image registry to pull a base from; the Dockerfiles take BASE as an argument, and here
it is Debian with Python. The host's settings for package registries are lent to the build as a
secret and a mount, and stay out of the image.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lock
import tools
from errors import ClusterError
from images import Images, Layer
from paths import CACHE, ROOT

Say = Callable[[str], None]

STORE = CACHE / "buildah"
BASE = "localhost/kvline-base:bookworm-1"
BUILDAH = [
    "buildah",
    "--root",
    f"{STORE}/root",
    "--runroot",
    f"{STORE}/run",
    "--storage-driver",
    "overlay",
]
COMPONENTS = ("operator", "server")
CUDA = "cuda"  # built only on request: three gigabytes, and kernels compiled with nvcc
DOCKERFILES = {CUDA: "server/cuda.Dockerfile"}
CACHED = "/var/cache/uv"  # in the build
REGISTRY_KEYS = ("PIP_", "UV_", "SSL_CERT", "REQUESTS_CA", "CURL_CA")


@dataclass(frozen=True, slots=True)
class Built:
    """An image in buildah's store, as a cluster needs it for its import."""

    name: str  # as pods name it
    config: dict[str, Any]
    layers: list[Layer]

    @property
    def component(self) -> str:
        return self.name.rpartition("-")[2].partition(":")[0]


def image_name(component: str) -> str:
    """A name tagged by content: a changed tree is another image, an equal one is found again."""
    digest = hashlib.sha256()
    for path in _sources(component):
        digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return f"localhost/kvline-{component}:{digest.hexdigest()[:12]}"


def _sources(component: str) -> Iterator[Path]:
    yield from sorted((ROOT / "operator").rglob("*.py"))
    yield from sorted((ROOT / "server").rglob("*.py"))
    yield ROOT / "pyproject.toml"
    yield ROOT / dockerfile(component)
    yield ROOT / "requirements" / f"{component}.txt"


def dockerfile(component: str) -> str:
    return DOCKERFILES.get(component, f"{component}/Dockerfile")


def build(say: Say, components: tuple[str, ...] = COMPONENTS, *extra: Path) -> list[Built]:
    """The images, built where they are not in the store yet; `extra` files go into dist/."""
    with lock.held(STORE / "lock"):
        return _build_missing(say, components, extra)


def load(images: Images, say: Say) -> None:
    """Builds what is missing, and adds it to a cluster's images."""
    # Under one lock: while buildah runs for another, hard links cannot leave the store.
    with lock.held(STORE / "lock"):
        for image in _build_missing(say, COMPONENTS, ()):
            images.add(image.name, image.config, image.layers)


def load_as(images: Images, name: str, built: str) -> None:
    """Adds an image that is built already, by that name."""
    with lock.held(STORE / "lock"):
        image = inspect(built)
        images.add(name, image.config, image.layers)


def _build_missing(say: Say, components: tuple[str, ...], extra: tuple[Path, ...]) -> list[Built]:
    release()
    missing = [c for c in components if not _exists(image_name(c))]
    if missing:
        _ensure_base(say)
        _wheel()
        for file in extra:
            shutil.copy(file, ROOT / "dist")
    for component in missing:
        started = time.monotonic()
        _build(component)
        say(f"built the {component} image ({time.monotonic() - started:.0f} s)")
    return [inspect(image_name(c)) for c in components]


def release() -> None:
    """Removes containers of builds that were killed or found the disk full. They keep the store
    mounted onto itself, and hard links, which a cluster's layers are, cannot leave a mount."""
    _buildah("rm", "--all", check=False)


def _buildah(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*BUILDAH, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if check and done.returncode:
        raise ClusterError(f"buildah {arguments[0]} failed:\n{done.stderr[-2000:]}")
    return done


def _exists(name: str) -> bool:
    found = _buildah("inspect", "--type", "image", name, check=False)
    return found.returncode == 0


def _ensure_base(say: Say) -> None:
    if _buildah("inspect", "--type", "image", BASE, check=False).returncode == 0:
        return
    started = time.monotonic()
    rootfs = STORE / "base-rootfs"
    shutil.rmtree(rootfs, ignore_errors=True)
    rootfs.mkdir(parents=True)
    packages = "--include=python3,python3-venv,ca-certificates"
    done = subprocess.run(
        ["debootstrap", "--variant=minbase", packages, "bookworm", str(rootfs)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ClusterError(f"debootstrap failed:\n{done.stdout[-1500:]}")
    for waste in (
        "var/cache/apt",
        "var/lib/apt/lists",
        "usr/share/doc",
        "usr/share/man",
        "usr/share/locale",
    ):
        shutil.rmtree(rootfs / waste, ignore_errors=True)
    container = _buildah("from", "scratch").stdout.strip()
    _buildah("add", "--quiet", container, str(rootfs), "/")
    _buildah("commit", "--quiet", "--rm", container, BASE)
    shutil.rmtree(rootfs)
    say(f"made the base image ({time.monotonic() - started:.0f} s)")


def _wheel() -> None:
    for old in (ROOT / "dist").glob("*.whl"):
        old.unlink()
    tools.run_uv("build", "--quiet", "--wheel", "--out-dir", "dist", ".")


def _build(component: str) -> None:
    secret = STORE / "registry.env"
    lines = [f'{k}="{v}"' for k, v in os.environ.items() if k.startswith(REGISTRY_KEYS)]
    cache = tools.run_uv("cache", "dir").strip()  # what the machine's environments have fetched
    Path(cache).mkdir(parents=True, exist_ok=True)
    secret.write_text("\n".join([*lines, "UV_SYSTEM_CERTS=1", f"UV_CACHE_DIR={CACHED}"]) + "\n")
    mounts = ["--volume", "/etc/ssl/certs:/etc/ssl/certs:ro", "--volume", f"{cache}:{CACHED}"]
    if Path("/etc/pip.conf").is_file():
        mounts += ["--volume", "/etc/pip.conf:/etc/pip.conf:ro"]
    try:
        _buildah(
            "build",
            "--quiet",
            "--layers",
            "--isolation",
            "chroot",
            "--network",
            "host",
            "--build-arg",
            f"BASE={BASE}",
            "--secret",
            f"id=registry,src={secret}",
            *mounts,
            "--file",
            dockerfile(component),
            "--tag",
            image_name(component),
            ".",
        )
    finally:
        secret.unlink()


def inspect(name: str) -> Built:
    """Config and layer folders, lowest layer first."""
    about = json.loads(_buildah("inspect", "--type", "image", name).stdout)
    images = json.loads((STORE / "root/overlay-images/images.json").read_text())
    known = json.loads((STORE / "root/overlay-layers/layers.json").read_text())
    by_id = {layer["id"]: layer for layer in known}
    at = next(image["layer"] for image in images if image["id"] == about["FromImageID"])
    layers: list[Layer] = []
    while at:
        folder = STORE / "root" / "overlay" / at / "diff"
        layers.insert(0, Layer(folder, by_id[at]["diff-digest"]))
        at = by_id[at].get("parent")
    return Built(name, about["OCIv1"]["config"], layers)
