"""Faults that need a node: an image that does not exist, no GPU, a drain."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playground import eventually
from support import pods, wait
from test_main_job import RANDOM
from traffic import Streams, streaming

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

NOWHERE = "localhost/kvline-server@sha256:" + "0" * 64
NODE = "local"


@pytest.fixture
def streams(space: Any, cluster: Any, tmp_path: Path) -> Iterator[Streams]:
    """Two ready replicas under traffic, of which no request may fail."""
    space.apply("steady", **RANDOM, replicas=2)
    wait(space, "steady", "UpToDate", status="True")
    ip = space.get("service", "steady")["spec"]["clusterIP"]
    with streaming(cluster.network, ip, "steady", tmp_path, 2) as running:
        yield running
    assert running.failures == [] and running.ended


def serving(space: Any) -> int:
    return int(space.get("kvl", "steady")["status"].get("readyReplicas", 0))


def test_an_image_that_is_nowhere_and_a_gpu_that_is_not_free_change_nothing(
    space: Any, streams: Streams
) -> None:
    """F30, F33."""
    before = {p["metadata"]["uid"] for p in pods(space)}
    space.apply("steady", **RANDOM, replicas=2, image=NOWHERE)
    progressing = wait(space, "steady", "Progressing", reason="ImagePullFailed")
    assert NOWHERE in progressing["message"]
    assert serving(space) == 2

    needy = {**RANDOM, "resources": {"cpu": "100m", "memory": "1536Mi", "gpus": 1}}
    space.apply("steady", **needy, replicas=2, image=NOWHERE)
    progressing = wait(space, "steady", "Progressing", reason="Unschedulable")
    assert "Insufficient nvidia.com/gpu" in progressing["message"]
    assert serving(space) == 2

    space.apply("steady", **RANDOM, replicas=2)
    wait(space, "steady", "UpToDate", status="True")
    assert {p["metadata"]["uid"] for p in pods(space)} == before


def test_a_drain_takes_no_more_than_the_budget_allows(
    space: Any, cluster: Any, streams: Streams
) -> None:
    """F35: a drain of the only node, so that the first evicted replica stays missing until the node
    is back."""
    words = ("--pod-selector=kvline.dev/service=steady", "--delete-emptydir-data", "--timeout=25s")
    done = cluster.kubectl("drain", NODE, *words, check=False)
    try:
        assert done.returncode != 0 and "disruption budget" in done.stderr, done.stderr
        assert serving(space) == 1
    finally:
        cluster.kubectl("uncordon", NODE)
    eventually(lambda: serving(space) == 2, 120)
    wait(space, "steady", "UpToDate", status="True")
