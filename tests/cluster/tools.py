"""Programs that the scripts need on the machine: installed by apt-get, or named in an error."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from errors import ClusterError
from paths import CACHE, ROOT

Say = Callable[[str], None]

UV_VERSION = "0.13.9"
PACKAGES = {  # a command or file that shows it is there -> the Debian package
    "containerd": "containerd",
    "runc": "runc",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "iptables": "iptables",
    "nft": "nftables",
    "ip": "iproute2",
    "openssl": "openssl",
    "curl": "curl",
    "pkill": "procps",
    "debootstrap": "debootstrap",
    "buildah": "buildah",
}


def ensure_packages(say: Say, packages: dict[str, str] = PACKAGES) -> None:
    """Installs the missing ones; without apt-get the error names them."""
    missing = [package for wanted, package in packages.items() if not _is_there(wanted)]
    if missing:
        _install(missing, say)


def _is_there(wanted: str) -> bool:
    """A command, or a file by its path."""
    return Path(wanted).exists() if wanted.startswith("/") else shutil.which(wanted) is not None


def _install(missing: list[str], say: Say) -> None:
    if os.geteuid() != 0:
        raise ClusterError(f"{', '.join(missing)} can only be installed by root")
    if shutil.which("apt-get") is None:
        raise ClusterError(f"please install: {', '.join(missing)}")
    say(f"installing {', '.join(missing)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *missing]):
        done = subprocess.run(
            ["apt-get", *words], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ClusterError(f"apt-get {words[0]} failed:\n{done.stderr[-1500:]}")


def extracted(package: str, file: str, folder: Path, say: Say) -> Path:
    """A file of a Debian package that is not installed: no service of it starts."""
    target = folder / Path(file).name
    if target.is_file():
        return target
    if shutil.which("apt-get") is None:
        raise ClusterError(f"please put {target.name} into {folder}")
    say(f"fetching {target.name}")
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as scratch:
        unpack(package, Path(scratch))
        (Path(scratch) / file).rename(target)
    return target


def unpack(package: str, folder: Path) -> None:
    """Puts the files of a Debian package into a folder, and installs nothing."""
    for command in (
        ["apt-get", "update", "-qq"],
        ["apt-get", "download", "-qq", package],
        ["sh", "-c", "dpkg-deb -x *.deb . && rm *.deb"],
    ):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ClusterError(f"{' '.join(command)} failed:\n{done.stderr[-1500:]}")


def ensure_root() -> None:
    if os.geteuid() != 0:
        raise ClusterError("the local cluster needs root; or use your own: CLUSTER=current")


def ensure_space(gigabytes: int) -> None:
    """Checks before the long steps."""
    CACHE.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(CACHE).free / 1e9
    if free < gigabytes:
        raise ClusterError(f"{CACHE} has {free:.0f} GB free, {gigabytes} GB are needed")
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:") and int(line.split()[1]) < 7 * 2**20:
            have = int(line.split()[1]) / 2**20
            raise ClusterError(f"{have:.1f} GiB of memory are free, 7 GiB are needed")


def uv() -> str:
    """The pinned uv, in a tool environment of its own unless the machine has that version."""
    found = shutil.which("uv")
    if found and UV_VERSION in _output([found, "--version"]):
        return found
    folder = CACHE / "tools" / f"uv-{UV_VERSION}"
    program = folder / "bin" / "uv"
    if not program.is_file():
        if find_spec("ensurepip") is None:  # Debian keeps it in a package of its own
            _install(["python3-venv"], print)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(folder / "bin" / "pip"), "install", "--quiet", f"uv=={UV_VERSION}"]
        subprocess.run(pip, check=True)
    return str(program)


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def ensure_environment(folder: Path, requirements: Path, say: Say) -> Path:
    """A virtual environment with exactly the locked packages; nothing to do when it is there."""
    python = folder / "bin" / "python"
    mark = folder / ".requirements"
    want = hashlib.sha256(requirements.read_bytes()).hexdigest()
    if python.is_file() and mark.is_file() and mark.read_text() == want:
        return python
    say(f"installing the packages of {requirements.relative_to(ROOT)}")
    run_uv("venv", "--quiet", "--allow-existing", str(folder))
    run_uv("pip", "sync", "--quiet", "--require-hashes", "--python", str(python), str(requirements))
    mark.write_text(want)
    return python


def run_uv(*arguments: str) -> str:
    """Its output."""
    done = subprocess.run([uv(), *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"uv {' '.join(arguments[:3])} failed:\n{done.stderr[-1500:]}")
    return done.stdout
