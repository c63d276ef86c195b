"""Helm, built from its Go module like the cluster's programs, and the charts rendered with it."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable

import binaries
import golang
from errors import ClusterError
from paths import BIN, GO, ROOT

HELM = BIN / "helm"
KUBERNETES = "1.34.0"  # whose features templates are rendered for
HEAD = """\
# charts/kvline with manifests/install-values.yaml: `make manifests`. No image is pinned here:
# name both by digest, or use the chart.
"""


def ensure(say: Callable[[str], None]) -> None:
    """Nothing to do when it is there in the version that go.sum names."""
    folder = GO / "helm"
    want = hashlib.sha256((folder / "go.sum").read_bytes()).hexdigest()
    mark = BIN / ".helm"
    if HELM.is_file() and mark.is_file() and mark.read_text() == want:
        return
    say("building helm")
    go = golang.ensure(say)
    BIN.mkdir(parents=True, exist_ok=True)
    binaries.compile_program(go, "helm", folder, "helm.sh/helm/v3/cmd/helm", "-s -w")
    mark.write_text(want)


def helm(*words: str, input: str | None = None) -> str:
    """Its output; raises ClusterError with what it complained about."""
    done = subprocess.run([HELM, *words], cwd=ROOT, input=input, capture_output=True, text=True)
    if done.returncode:
        raise ClusterError(f"helm {words[0]}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def template(chart: str, *words: str) -> str:
    """A chart as it would be applied."""
    where = ("--namespace", "kvline-system", "--kube-version", KUBERNETES)
    return helm("template", "kvline", f"charts/{chart}", *where, *words)


def install_manifest() -> str:
    return HEAD + template("kvline", "--values", "manifests/install-values.yaml")


if __name__ == "__main__":
    ensure(print)
    (ROOT / "manifests" / "install.yaml").write_text(install_manifest())
    sys.exit(0)
