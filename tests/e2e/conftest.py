"""A real node, real images, the real operator in the cluster, the real model."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvline_contract.names import LABEL_SERVICE

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (Path(__file__).parent, ROOT / "tests" / "integration", ROOT / "tests" / "gpu_node")
sys.path[:0] = [str(folder) for folder in FOLDERS]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest of this folder first, so that workers end together."""

    def limit(item: pytest.Item) -> float:
        mark = item.get_closest_marker("timeout")
        return float(mark.args[0]) if mark and item.path.parent == Path(__file__).parent else 0.0

    items.sort(key=limit, reverse=True)


@pytest.fixture(scope="session")
def space() -> Iterator[Any]:
    """A namespace in the tests' own cluster, which can run beside a demo."""
    if os.geteuid() != 0:
        pytest.skip("the local cluster needs root")
    from local import LocalCluster
    from playground import own
    from support import up
    from waiting import spent

    if os.environ.get("KVLINE_E2E_NODE") == "gpu":
        import unpacked

        cluster, made = unpacked.up("team")
    else:
        cluster = LocalCluster(own("e2e"))
        made = up(cluster, "team")
    cluster.kubectl = spent("cluster")(cluster.kubectl)
    yield made
    cluster.down()


@pytest.fixture(scope="session")
def cluster(space: Any) -> Any:
    return space.cluster


@pytest.fixture(autouse=True)
def nothing_left(space: Any) -> Iterator[None]:
    """Deletes each test's resources, and waits for their pods before the next test starts."""
    from support import pods
    from waiting import eventually, limit

    yield
    space.kubectl("delete", "kvl", "--all", f"--timeout={limit(60):.0f}s")

    def gone() -> bool:
        return not [p for p in pods(space) if LABEL_SERVICE in _labels(p)]

    eventually(gone, 120, on="garbage collector")


def _labels(pod: dict[str, Any]) -> dict[str, str]:
    return dict(pod["metadata"].get("labels") or {})
