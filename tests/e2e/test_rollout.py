"""The gate on a real node, under streaming traffic: a good revision takes over, a bad one never
serves."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support import pods, wait
from test_main_job import RANDOM
from traffic import streaming
from waiting import eventually

from kvline_contract.names import LABEL_REVISION

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

MEASURED = {**RANDOM, "capacity": {}}
FEWER = {"maxModelLen": 512, "maxPrefillTokens": 128, "maxRunningRequests": 3}
GOOD = {**MEASURED, "engine": FEWER}
BAD = {**MEASURED, "resources": {"cpu": "100m", "memory": "1408Mi"}}


def rollout(space: Any) -> dict[str, Any]:
    return dict(space.get("kvl", "roll")["status"]["rollout"])


def test_a_good_rollout_and_a_bad_one_lose_no_request(
    space: Any, cluster: Any, tmp_path: Path
) -> None:
    space.apply("roll", **MEASURED)
    wait(space, "roll", "UpToDate", status="True")
    first = rollout(space)["stableRevision"]
    budget = space.get("kvl", "roll")["status"]["capacity"]["kvTokens"]
    ip = space.get("service", "roll")["spec"]["clusterIP"]
    moments = [time.time()]
    with streaming(cluster.network, ip, "roll", tmp_path, 2) as streams:
        space.apply("roll", **GOOD)
        eventually(lambda: rollout(space).get("candidateRevision"), 60)
        wait(space, "roll", "UpToDate", status="True")
        second = rollout(space)["stableRevision"]
        assert second != first
        assert rollout(space)["gate"]["result"] == "Passed"
        moments.append(time.time())

        space.apply("roll", **BAD)
        wait(space, "roll", "UpToDate", reason="RevisionRejected")
        gate = rollout(space)["gate"]
        assert (gate["result"], rollout(space)["stableRevision"]) == ("Rejected", second)
        assert gate["measured"] < gate["required"] <= gate["baseline"]
        assert gate["baseline"] >= budget
        eventually(lambda: len(pods(space)) == 1, 60, on="pod")
        assert pods(space)[0]["metadata"]["labels"][LABEL_REVISION] == second
        assert space.get("kvl", "roll")["status"]["capacity"]["kvTokens"] >= gate["required"]
        moments.append(time.time())
    assert streams.failures == []
    for start, end in pairwise(moments):
        assert any(start < moment < end for moment in streams.ended)


def test_recreate_takes_nothing_away_for_a_model_that_is_not_there(space: Any) -> None:
    """The Job that checks the model runs beside what serves; a corrected spec goes through."""
    recreate = {**RANDOM, "rollout": {"strategy": "Recreate"}}
    space.apply("again", **recreate)
    wait(space, "again", "UpToDate", status="True")
    before = {p["metadata"]["uid"] for p in pods(space)}
    wrong = {"source": "pvc://models/typo", "loadFormat": "random"}
    space.apply("again", **{**recreate, "model": wrong})
    found = wait(space, "again", "ModelAvailable", reason="NotFound")
    assert "/models/typo: no such folder" in found["message"]
    assert {p["metadata"]["uid"] for p in pods(space)} == before
    assert space.condition("Ready", "again")["status"] == "True"
    space.apply("again", **{**recreate, "engine": FEWER})
    eventually(lambda: not before & {p["metadata"]["uid"] for p in pods(space)}, 120, on="pod")
    wait(space, "again", "UpToDate", status="True")
