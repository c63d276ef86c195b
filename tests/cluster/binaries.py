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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

LOCK = CACHE / "build.lock"
REPORT_SECONDS = 60


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
        with reported(say, f"building {name} ({number}/{len(PROGRAMS)})"):
            compile_program(go, name, GO / module, ".", flags)
    link_kubernetes()
    (BIN / ".built").write_text(_key())


@contextmanager
def reported(say: Callable[[str], None], what: str) -> Iterator[None]:
    """What is under way, at once and again every REPORT_SECONDS: a program may take minutes."""
    started, ended = time.monotonic(), threading.Event()

    def report() -> None:
        while not ended.wait(REPORT_SECONDS):
            say(f"{what}, {time.monotonic() - started:.0f} s so far")

    say(what)
    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        yield
    finally:
        ended.set()
        reporter.join()


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
            with reported(say, f"building {name}"):
                compile_program(go, name, folder, package, "-s -w", tags)
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
) -> None:
    """Builds one program without debug information; static but where `environment` has it use C."""
    command = [go, "build", "-trimpath", "-buildvcs=false", "-gcflags=all=-dwarf=false"]
    command += ["-tags", tags, "-ldflags", flags]
    done = subprocess.run(
        [*command, "-o", str(into / name), package],
        cwd=folder,
        # The compiler collects garbage less often: less CPU for more memory.
        env={"GOGC": "400", **os.environ, "CGO_ENABLED": "0", **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ClusterError(f"building {name} failed:\n{done.stderr[-2000:]}")


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
