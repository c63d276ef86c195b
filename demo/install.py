"""CRD and operator, from the manifests that users apply."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import crd
from build import COMPONENTS
from clusters import Cluster
from errors import ClusterError

ROOT = Path(__file__).resolve().parents[1]
OPERATOR = ("-n", "kvline-system")
ROLLED_OUT = ("rollout", "status", "deployment/kvline-operator", "--timeout=180s")


def install(cluster: Cluster, say: Callable[[str], None]) -> None:
    crd.define(cluster.kubectl)
    cluster.kubectl("apply", "-f", "-", input=manifest(cluster.image_names()))
    cluster.kubectl("apply", "-f", str(ROOT / "demo" / "page.yaml"))
    cluster.kubectl(*OPERATOR, *ROLLED_OUT)


def manifest(images: dict[str, str]) -> str:
    """install.yaml with these images, component -> name, and the page. Raises ClusterError."""
    text = (ROOT / "manifests" / "install.yaml").read_text()
    for component in COMPONENTS:
        text = _replaced(text, f"localhost/kvline-{component}:dev", images[component])
    if "cuda" in images:  # the manifest names none: not all clusters have GPUs
        first = "            - {name: KVLINE_ALLOW_IMAGE_TAGS"
        cuda = f'            - {{name: KVLINE_DEFAULT_CUDA_IMAGE, value: "{images["cuda"]}"}}\n'
        text = _replaced(text, first, cuda + first)
    return _replaced(text, "            - --page-port=0\n", "")  # off by default, shown here


def _replaced(text: str, old: str, new: str) -> str:
    if old not in text:
        raise ClusterError(f"manifests/install.yaml has no line with «{old.strip()}» any more")
    return text.replace(old, new)
