"""Programs that a GPU node needs beside Kubernetes', built from their Go modules.

A machine with a GPU may have none of Debian's: containerd 2 (which reads CDI), runc, two CNI
plug-ins and two device plug-ins. All are static, but for NVIDIA's, which load the driver's library
as they run.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import binaries
import golang
import lock
import tools
from errors import ClusterError
from paths import CACHE

Say = Callable[[str], None]

SOURCES = Path(__file__).parent / "go"
FOLDER = CACHE / "gpu-node"
BIN, CNI = FOLDER / "bin", FOLDER / "cni"
UNPACKED = FOLDER / "unpacked.json"  # there where packed parts brought what is here
PLUGIN, NVIDIA_PLUGIN, NVIDIA_HOOK = "device-plugin", "nvidia-device-plugin", "nvidia-cdi-hook"

CONTAINERD = "github.com/containerd/containerd/v2"
NVIDIA = "github.com/NVIDIA"
PLUGINS = "github.com/containernetworking/plugins/plugins"
C = {"CGO_ENABLED": "1"}
# Libraries of the driver are there only when these run.
LAZY = "-extldflags=-Wl,-z,lazy"
STATIC = "netgo osusergo"
NO_SNAPSHOTTERS = "no_btrfs,no_devmapper,no_zfs"


@dataclass(frozen=True, slots=True)
class Program:
    name: str
    module: str  # its folder of SOURCES
    package: str
    into: Path = BIN
    flags: str = ""
    tags: str = ""
    c: bool = False


NODE = (
    Program("containerd", "containerd", "./node", tags=NO_SNAPSHOTTERS),
    Program("containerd-shim-runc-v2", "containerd", "./shim", tags=NO_SNAPSHOTTERS),
    Program("runc", "runc", "github.com/opencontainers/runc", tags=f"seccomp {STATIC}", c=True),
    Program("bridge", "cni", f"{PLUGINS}/main/bridge", into=CNI),
    Program("host-local", "cni", f"{PLUGINS}/ipam/host-local", into=CNI),
    Program(PLUGIN, "device-plugin", "."),
)
OF_NVIDIA = (
    Program(
        NVIDIA_PLUGIN,
        "nvidia-plugin",
        f"{NVIDIA}/k8s-device-plugin/cmd/{NVIDIA_PLUGIN}",
        flags=LAZY,
        c=True,
    ),
    Program(
        NVIDIA_HOOK,
        "nvidia-hook",
        f"{NVIDIA}/nvidia-container-toolkit/cmd/{NVIDIA_HOOK}",
        flags=LAZY,
        c=True,
    ),
)
LINKS = {"ctr": "containerd"}  # called by another name


def build(say: Say, programs: tuple[Program, ...] = NODE) -> None:
    """Builds those that the cache lacks for their sources; packed parts bring all. Raises
    ClusterError for parts of other sources."""
    if UNPACKED.is_file():
        if json.loads(UNPACKED.read_text())["sources"] != sources():
            raise ClusterError(
                f"{UNPACKED.parent} was unpacked from parts of other sources: make gpu-node anew, "
                f"remove that folder, and unpack"
            )
        return
    with lock.held(FOLDER / "lock"):
        for program in programs:
            mark, want = FOLDER / f".{program.name}", _key(program)
            made = program.into / program.name
            if made.is_file() and mark.is_file() and mark.read_text() == want:
                continue
            started = time.monotonic()
            _build(program, say)
            mark.write_text(want)
            say(f"built {program.name} ({time.monotonic() - started:.0f} s)")
        link()


def sources() -> str:
    """What the programs are built from; another checkout may have other versions."""
    keys = "".join(map(_key, NODE + OF_NVIDIA))
    return hashlib.sha256(keys.encode()).hexdigest()


def link() -> None:
    for other, name in LINKS.items():
        (BIN / other).unlink(missing_ok=True)
        (BIN / other).hardlink_to(BIN / name)


def _build(program: Program, say: Say) -> None:
    tools.ensure_packages(say, {"cc": "gcc", "/usr/include/stdio.h": "libc6-dev"})
    go = golang.ensure(say)
    program.into.mkdir(parents=True, exist_ok=True)
    flags, environment = f"-s -w {program.flags}", dict(C) if program.c else {}
    if program.module == "containerd":
        flags += f" -X {CONTAINERD}/version.Version=v{version('containerd', CONTAINERD)}"
    if program.name == "runc":
        seccomp = _seccomp(say)
        flags += f" -linkmode external -extldflags '-static -L{seccomp}/lib/x86_64-linux-gnu'"
        flags += f" -X main.version={version('runc', 'github.com/opencontainers/runc')}"
        environment["CGO_CFLAGS"] = f"-I{seccomp}/include"
        environment["PKG_CONFIG_PATH"] = f"{seccomp}/lib/x86_64-linux-gnu/pkgconfig"
    source = SOURCES / program.module
    binaries.compile_program(
        go, program.name, source, program.package, flags, program.tags, program.into, environment
    )


def version(module: str, path: str) -> str:
    """The version of a Go module that go.mod names, without its v."""
    found = re.search(rf"{re.escape(path)} v([\d.]+)", (SOURCES / module / "go.mod").read_text())
    if found is None:
        raise ClusterError(f"{module}/go.mod does not name {path}")
    return found[1]


def _seccomp(say: Say) -> Path:
    """Headers and static library of libseccomp, which runc applies pods' profiles with."""
    folder = FOLDER / "libseccomp"
    if not (folder / "usr/lib/x86_64-linux-gnu/libseccomp.a").is_file():
        say("fetching libseccomp-dev")
        tools.ensure_packages(say, {"pkg-config": "pkg-config"})
        folder.mkdir(parents=True, exist_ok=True)
        tools.unpack("libseccomp-dev", folder)
    return folder / "usr"


def _key(program: Program) -> str:
    words = (program.name, program.package, program.flags, program.tags)
    digest = hashlib.sha256(repr(words).encode())  # not where it goes, which differs by machine
    for path in sorted((SOURCES / program.module).rglob("*")):
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()
