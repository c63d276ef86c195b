"""Helm, built from its Go module like the cluster's programs, and the charts rendered with it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable

import binaries
from errors import ClusterError
from paths import BIN, ROOT

HELM = BIN / "helm"
KUBERNETES = "1.34.0"  # the Kubernetes version that templates are rendered for
# Helm warns of links in a chart, and packs what they lead to.
COPIES = {
    "manifests/crd.yaml": "charts/kvline-crds/crd.yaml",
    "monitoring/alerts.yaml": "charts/kvline/alerts.yaml",
}
HEAD = """\
# charts/kvline with manifests/install-values.yaml, and the roles of charts/kvline-crds:
# `make manifests`. No image is pinned here:
# name both by digest, or use the chart.
"""


def ensure(say: Callable[[str], None]) -> None:
    binaries.ensure("helm", say)


def helm(*words: str, input: str | None = None) -> str:
    """Helm's output; raises ClusterError with its error."""
    done = subprocess.run([HELM, *words], cwd=ROOT, input=input, capture_output=True, text=True)
    if done.returncode:
        raise ClusterError(f"helm {words[0]}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def template(chart: str, *words: str) -> str:
    """A chart's rendered objects."""
    where = ("--namespace", "kvline-system", "--kube-version", KUBERNETES)
    return helm("template", "kvline", f"charts/{chart}", *where, *words)


def install_manifest() -> str:
    roles = template("kvline-crds", "--show-only", "templates/roles.yaml")
    return HEAD + template("kvline", "--values", "manifests/install-values.yaml") + roles


if __name__ == "__main__":
    ensure(print)
    for source, copy in COPIES.items():
        shutil.copyfile(ROOT / source, ROOT / copy)
    (ROOT / "manifests" / "install.yaml").write_text(install_manifest())
    sys.exit(0)
