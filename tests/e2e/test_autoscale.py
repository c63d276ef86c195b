"""Real replicas follow a real load: more while streams wait, fewer when they have ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playground import eventually
from support import describe, pods, wait
from test_main_job import RANDOM
from traffic import streaming

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

HOW = {"minReplicas": 1, "maxReplicas": 2, "targetPercent": 50, "scaleDownDelaySeconds": 20}
ONE_AT_A_TIME = {"maxModelLen": 512, "maxPrefillTokens": 128, "maxRunningRequests": 2}


def test_streams_that_wait_bring_a_second_replica_and_rest_takes_it(
    space: Any, cluster: Any, tmp_path: Path
) -> None:
    space.apply("busy", **{**RANDOM, "engine": ONE_AT_A_TIME}, autoscaling=HOW)
    wait(space, "busy", "UpToDate", status="True")
    assert len(pods(space)) == 1
    ip = space.get("service", "busy")["spec"]["clusterIP"]
    with streaming(cluster.network, ip, "busy", tmp_path, 4) as streams:
        try:
            eventually(lambda: space.get("kvl", "busy")["status"].get("readyReplicas") == 2, 240)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{describe(space, 'busy')}") from None
    assert streams.failures == []
    messages = [e["message"] for e in space.list("events") if e["reason"] == "Scaled"]
    assert messages[0].startswith("from 1 to 2: ") and "running" in messages[0]
    eventually(lambda: len(pods(space)) == 1, 120)
    wait(space, "busy", "UpToDate", status="True")
