"""Builds Kubernetes, etcd, CoreDNS and pause from their Go modules, once, into the cache.

go.mod and go.sum beside the sources are the lock; the cache is keyed by their content, so a change
of version builds anew and nothing else does.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import golang
import lock
import tools
from errors import ClusterError
from paths import BIN, CACHE, GO

# Links to one program, which is each of them by its name.
KUBERNETES = (
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kubectl",
    "kube-proxy",
    "etcd",
)
PROGRAMS = {"kube": "kubernetes", "coredns": "coredns", "pause": "pause"}  # its module

# The compiler collects no garbage before it has so much memory: a sixth less CPU than at GOGC=400.
COMPILER = {"GOGC": "off", "GOMEMLIMIT": "1500MiB"}
LOCK = CACHE / "build.lock"
REPORT_SECONDS = 60
# What decides, with tags, whether a compiled package of Go's cache can be used.
FLAGS = ("-trimpath", "-buildvcs=false", "-gcflags=all=-dwarf=false")


def build(say: Callable[[str], None]) -> None:
    """Does nothing if the cache has the programs of this go.sum."""
    with lock.held(LOCK):
        tools.ensure_packages(say)
        _build(say)


def are_built() -> bool:
    """Whether the cache has the programs of this go.sum."""
    mark = BIN / ".built"
    complete = all((BIN / name).is_file() for name in (*PROGRAMS, *KUBERNETES))
    return complete and mark.is_file() and mark.read_text() == _key()


def _build(say: Callable[[str], None]) -> None:
    if are_built():
        return
    go = golang.ensure(say)
    BIN.mkdir(parents=True, exist_ok=True)
    version = _kubernetes_version()
    for number, (name, module) in enumerate(PROGRAMS.items(), 1):
        flags = f"-s -w -X k8s.io/component-base/version.gitVersion={version}"
        what = f"building {name} ({number}/{len(PROGRAMS)})"
        with reported(say, what, partial(packages, go, GO / module, ".")) as compiled:
            compile_program(go, name, GO / module, ".", flags, compiled=compiled)
    link_kubernetes()
    (BIN / ".built").write_text(_key())


@contextmanager
def reported(
    say: Callable[[str], None], what: str, count: Callable[[], int]
) -> Iterator[Callable[[str], None]]:
    """Says what is under way, at once and again every REPORT_SECONDS with an estimate: a program
    may take minutes, and so may it to `count` its packages, which fetches them. Yields what is to
    be called with each that is compiled."""
    began, counted, ended = time.monotonic(), 0.0, threading.Event()
    done, total = list[str](), None

    def report() -> None:
        while not ended.wait(REPORT_SECONDS):
            say(f"{what}, {progress(time.monotonic() - began, len(done), total, counted)}")

    say(what)
    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        total = count()
        counted = time.monotonic() - began
        yield done.append
    finally:
        ended.set()
        reporter.join()


def progress(took: float, done: int, packages: int | None, counted: float = 0.0) -> str:
    """Of a build that has taken so many seconds, `counted` of them until the number of packages to
    compile was known, which is None before. They come in the order of their imports: most have a
    like size."""
    if packages is None:
        return f"{took:.0f} s so far, fetching modules"
    text = f"{took:.0f} s so far, {done:,} of {packages:,} packages"
    if not done:
        return text
    rest = (took - counted) / done * max(0, packages - done)
    return f"{text}, about {rest / 60:.0f} minutes to go" if rest >= 30 else f"{text}, nearly done"


def packages(go: str, folder: Path, package: str, tags: str = "") -> int:
    """How many packages of the program are to be compiled: fewer where Go's cache has some, of a
    build that was stopped or of another program."""
    stale = ("-f", "{{if .Stale}}{{.ImportPath}}{{end}}")
    done = subprocess.run(
        [go, "list", "-deps", *stale, *FLAGS, "-tags", tags, package],
        cwd=folder,
        env={**os.environ, "CGO_ENABLED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ClusterError(f"what {package} is made of:\n{done.stderr[-2000:]}")
    return len(done.stdout.split())


def link_kubernetes() -> None:
    for name in KUBERNETES:
        (BIN / name).unlink(missing_ok=True)
        (BIN / name).hardlink_to(BIN / "kube")


# Programs that only some tests need -> the folder of go.mod, the package, build tags.
EXTRAS = {
    # Locked with Kubernetes: what it shares with it is compiled once.
    "helm": ("kubernetes", "helm.sh/helm/v3/cmd/helm", ""),
    "kube-score": ("kube-score", "github.com/zegl/kube-score/cmd/kube-score", ""),
    "kwok": ("kwok", "sigs.k8s.io/kwok/cmd/kwok", ""),
    "kubeconform": ("kubeconform", "github.com/yannh/kubeconform/cmd/kubeconform", ""),
    # Kubernetes service discovery alone: the other kinds are most of its build.
    "prometheus": (
        "prometheus",
        "github.com/prometheus/prometheus/cmd/prometheus",
        "remove_all_sd,enable_kubernetes_sd",
    ),
    "prometheus-adapter": (
        "prometheus-adapter",
        "sigs.k8s.io/prometheus-adapter/cmd/adapter",
        "",
    ),
}


def ensure(name: str, say: Callable[[str], None]) -> Path:
    """Builds one of the extras, unless it is there for this go.sum."""
    if name == "promtool":
        with lock.held(LOCK):
            return tools.extracted("prometheus", "usr/bin/promtool", CACHE / "debian", say)
    module, package, tags = EXTRAS[name]
    folder, mark = GO / module, BIN / f".{name}"
    want = hashlib.sha256((folder / "go.sum").read_bytes()).hexdigest()
    with lock.held(LOCK):
        if not ((BIN / name).is_file() and mark.is_file() and mark.read_text() == want):
            started = time.monotonic()
            go = golang.ensure(say)
            BIN.mkdir(parents=True, exist_ok=True)
            count = partial(packages, go, folder, package, tags)
            with reported(say, f"building {name}", count) as compiled:
                compile_program(go, name, folder, package, "-s -w", tags, compiled=compiled)
            mark.write_text(want)
            say(f"built {name} ({time.monotonic() - started:.0f} s)")
    return BIN / name


def compile_program(
    go: str,
    name: str,
    folder: Path,
    package: str,
    flags: str,
    tags: str = "",
    into: Path = BIN,
    environment: dict[str, str] | None = None,
    compiled: Callable[[str], object] = lambda package: None,
) -> None:
    """Builds one program without debug information; static but where `environment` has it use C.
    Calls `compiled` with each package that was not there yet."""
    command = [go, "build", "-v", *FLAGS, "-tags", tags, "-ldflags", flags]
    building = subprocess.Popen(
        [*command, "-o", str(into / name), package],
        cwd=folder,
        env={**COMPILER, **os.environ, "CGO_ENABLED": "0", **(environment or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert building.stderr is not None
    last: deque[str] = deque(maxlen=40)
    for line in building.stderr:
        last.append(line)
        compiled(line.strip())
    if building.wait():
        raise ClusterError(f"building {name} failed:\n{''.join(last)[-2000:]}")


def _key() -> str:
    digest = hashlib.sha256()
    for path in sorted(GO.rglob("*")):
        if path.is_file() and path.parent.name in PROGRAMS.values():
            digest.update(path.relative_to(GO).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def _kubernetes_version() -> str:
    text = (GO / "kubernetes" / "go.mod").read_text()
    found = re.search(r"k8s\.io/kubernetes (v[\d.]+)", text)
    if found is None:
        raise ClusterError("go.mod does not name k8s.io/kubernetes")
    return found[1]
