"""Fixtures of the integration tests; the classes behind them are in playground.py."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))

from playground import RESYNC, Node, Operator, Space, identity, own
from proxy import ACCOUNT, Proxy
from rolling import Service
from waiting import eventually, spent


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    if os.geteuid() != 0:
        pytest.skip("the local control plane needs root")
    import crd
    from local import LocalCluster

    made = LocalCluster(own("integration"), "control")
    made.claim_use()
    with spent("cluster"):
        made.down()
        made.up(print)
    made.kubectl = spent("cluster")(made.kubectl)  # type: ignore[method-assign]
    crd.define(made.kubectl)
    made.kubectl("apply", "-f", "-", input=yaml.safe_dump_all(identity()))
    made.kubeconfig_of("kvline-system", "kvline-operator")
    yield made
    made.down()


@pytest.fixture
def space(cluster: Any) -> Iterator[Space]:
    name = f"t-{uuid.uuid4().hex[:8]}"
    cluster.kubectl("create", "namespace", name)
    yield Space(cluster, name)
    cluster.kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")


def ended(operator: Operator) -> None:
    """Stops it. A traceback in its log is a failure, also where it does not end in time."""
    try:
        operator.stop()
    finally:
        text = operator.log.read_text()
        assert "Traceback" not in text, text[-3000:]


@pytest.fixture
def operator(space: Space, tmp_path: Path) -> Iterator[Operator]:
    made = Operator(space, tmp_path / "operator.log").start()
    yield made
    ended(made)


@pytest.fixture
def proxy(space: Space, tmp_path: Path) -> Iterator[Proxy]:
    made = Proxy(space.cluster.kubeconfig.parent / ACCOUNT, tmp_path)
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture
def resync() -> float:
    """Seconds between resyncs of the operator behind the proxy; a test's parameter instead, where
    it waits for one, or must not be helped by one."""
    return RESYNC


@pytest.fixture
def behind(space: Space, proxy: Proxy, tmp_path: Path, resync: float) -> Iterator[Operator]:
    """An operator that reaches the API server only through the proxy."""
    made = Operator(space, tmp_path / "operator.log", kubeconfig=proxy.kubeconfig)
    made.resync = resync
    eventually(made.start().is_well)
    yield made
    ended(made)


@pytest.fixture
def until() -> Callable[..., Any]:
    return eventually


@pytest.fixture
def node(space: Space) -> Iterator[Node]:
    made = Node(space)
    yield made
    made.close()


@pytest.fixture
def service(space: Any, operator: Any, node: Any) -> Service:
    """A service with two ready replicas of 4,096 tokens."""
    made = Service(space, node)
    space.apply(replicas=2)
    (first,) = eventually(lambda: {made.revision(p) for p in node.pods()})
    made.tokens = {first: 4096}
    made.until_reason("UpToDate")
    made.fewest_ready = 1 << 30
    return made
