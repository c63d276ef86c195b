"""CRD and operator, from the manifests that users apply."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import crd
from clusters import Cluster

ROOT = Path(__file__).resolve().parents[1]
OPERATOR = ("-n", "kvline-system")
ROLLED_OUT = ("rollout", "status", "deployment/kvline-operator", "--timeout=180s")


def install(cluster: Cluster, say: Callable[[str], None]) -> None:
    crd.define(cluster.kubectl)
    text = (ROOT / "manifests" / "install.yaml").read_text()
    images = cluster.image_names()
    for component, image in images.items():
        text = text.replace(f"localhost/kvline-{component}:dev", image)
    if "cuda" in images:  # the manifest names none: not all clusters have GPUs
        first = "            - {name: KVLINE_ALLOW_IMAGE_TAGS"
        cuda = f'            - {{name: KVLINE_DEFAULT_CUDA_IMAGE, value: "{images["cuda"]}"}}\n'
        text = text.replace(first, cuda + first)
    text = text.replace("            - --page-port=0\n", "")  # off by default, shown here
    cluster.kubectl("apply", "-f", "-", input=text)
    cluster.kubectl("apply", "-f", str(ROOT / "demo" / "page.yaml"))
    cluster.kubectl(*OPERATOR, *ROLLED_OUT)
