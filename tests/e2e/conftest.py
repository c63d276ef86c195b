"""A real node, real images, the real operator in the cluster, the real model."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESTRICTED = "pod-security.kubernetes.io/enforce=restricted"
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests" / "integration")]


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """The tests' own cluster, beside a demo that may be running."""
    if os.geteuid() != 0:
        pytest.skip("the local cluster needs root")
    import build
    import helm
    import model
    from local import LocalCluster
    from support import install

    helm.ensure(print)
    model.ensure(print)
    made = LocalCluster("e2e")
    made.down()
    made.up(print)
    for image in build.build(print):
        made.images.add(image.name, image.config, image.layers)
    made.kubectl("create", "namespace", "kvline-system")
    made.kubectl("label", "namespace", "kvline-system", RESTRICTED)
    install(made)
    yield made
    made.down()


@pytest.fixture(scope="session")
def space(cluster: Any) -> Any:
    """A namespace that refuses every pod that is not restricted, with the models in a claim."""
    import model
    from playground import Space

    cluster.kubectl("create", "namespace", "team")
    cluster.kubectl("label", "namespace", "team", RESTRICTED)
    cluster.claim("team", model.MODELS)
    return Space(cluster, "team")


@pytest.fixture(autouse=True)
def nothing_left(space: Any) -> Iterator[None]:
    """Each test's resources go at its end; what a failure left is shown."""
    yield
    space.kubectl("delete", "kvl", "--all", "--timeout=60s")
