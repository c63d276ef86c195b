"""A service of `gpus: 2` on a real node, with two CPU ranks in the place of two GPUs: the operator,
the pod and the report are those of GPUs."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import even_heads
import model
import pytest
from support import columns, describe, pods, wait
from test_main_job import answers_of_smollm2
from waiting import eventually

from kvline_contract.exits import ExitCode
from kvline_contract.names import CPU_RANK, LABEL_REVISION

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        os.environ.get("KVLINE_E2E_NODE") == "gpu", reason="that node's models have no weights"
    ),
]

ENGINE = {"maxModelLen": 512, "maxPrefillTokens": 128, "maxRunningRequests": 4}
RANKS = {"cpu": "100m", "memory": "2Gi", "gpus": 2, "gpuResource": CPU_RANK}
TWO = {
    "model": {"source": "pvc://even/smollm2"},
    "engine": ENGINE,
    "resources": RANKS,
}
NINE_HEADS = {**TWO, "model": {"source": "pvc://models/smollm2"}}
THREE = {**NINE_HEADS, "resources": {**RANKS, "memory": "3Gi", "gpus": 3}}

# Ends every rank but the first, as a fault of its GPU's would, and prints how many there were.
KILL = """
import os, pathlib, signal
found = 0
for file in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
        words = file.read_text().split("\\0")
    except OSError:
        continue
    if "kvline_server.engine_process.rank" in words:
        os.kill(int(file.parent.name), signal.SIGKILL)
        found += 1
print(found)
"""


@pytest.fixture(scope="module")
def even(space: Any, cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    """SmolLM2 with heads that two ranks divide, in a claim of its own."""
    folder = tmp_path_factory.mktemp("even")
    folder.chmod(0o755)
    even_heads.write(model.MODEL, folder / "smollm2")
    cluster.claim(space.name, folder, "even")


def capacity(space: Any) -> dict[str, Any]:
    return dict(space.get("kvl", "two")["status"]["capacity"])


def rollout(space: Any) -> dict[str, Any]:
    return dict(space.get("kvl", "two")["status"]["rollout"])


def kill(space: Any, revision: str) -> dict[str, Any]:
    """Rank 1 of the revision's only pod, as soon as there is one. -> how the container ended"""

    def container() -> dict[str, Any]:
        for pod in pods(space):
            if pod["metadata"]["labels"][LABEL_REVISION] == revision:
                for status in pod["status"].get("containerStatuses") or ():
                    return {"pod": pod["metadata"]["name"], **status}
        return {}

    def ended() -> dict[str, Any]:
        """How it ended: the kubelet may count a restart before it says that."""
        now = container()
        assert now, f"the pod of revision {revision} is gone\n{describe(space, 'two')}"
        restarted = now["restartCount"] > before["restartCount"]
        return dict((now.get("lastState") or {}).get("terminated") or {}) if restarted else {}

    before = eventually(container, 60, on="pod")
    words = ("exec", before["pod"], "-c", "server", "--", "/opt/kvline/bin/python", "-c", KILL)
    eventually(lambda: space.kubectl(*words, check=False).stdout.strip() == "1", 60, on="pod")
    last = eventually(ended, 60, on="pod")
    assert last["exitCode"] == ExitCode.RANK_LOST, last
    return dict(json.loads(last["message"]))


def test_two_ranks_become_one_budget_that_serves_and_a_lost_rank_rejects_nothing(
    space: Any, cluster: Any, even: None
) -> None:
    space.apply("two", **TWO)
    wait(space, "two", "UpToDate", status="True")
    assert space.condition("Ready", "two")["status"] == "True"
    ranks_add_up(space)
    every_reader_shows_both(space, cluster)
    answers_of_smollm2(space, "two")

    first, tokens = rollout(space)["stableRevision"], capacity(space)["kvTokens"]
    assert "rank 1 ended with signal 9" in kill(space, first)["message"]
    lost = wait(space, "two", "Progressing", reason="RankLost")
    assert "rank 1 ended with signal 9" in lost["message"]
    assert capacity(space)["kvTokens"] == tokens and not capacity(space)["serving"]
    wait(space, "two", "UpToDate", status="True")
    assert space.condition("CapacityStable", "two")["status"] == "True"
    assert capacity(space)["serving"] and rollout(space)["stableRevision"] == first

    space.apply("two", **{**TWO, "engine": {**ENGINE, "maxRunningRequests": 3}})
    second = str(eventually(lambda: rollout(space).get("candidateRevision"), 60))
    for _ in range(2):  # of any other code the second one rejects
        kill(space, second)
        wait(space, "two", "Progressing", reason="RankLost")
        assert rollout(space)["gate"]["result"] == "Held"
        assert space.condition("Ready", "two")["status"] == "True"
    wait(space, "two", "UpToDate", status="True")
    assert rollout(space)["stableRevision"] == second
    assert rollout(space)["gate"]["result"] == "Passed"


def ranks_add_up(space: Any) -> None:
    """Each rank has half of the container's memory, and the same KV cache in it."""
    found = capacity(space)
    assert found["kvTokens"] > 4096 and found["source"] == "Measured"
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    headroom, cache = [], set()
    for rank in found["ranks"]:
        parts = {part["name"]: part["mib"] for part in rank["parts"]}
        assert sum(parts.values()) == rank["totalMiB"] == 1024
        assert 0 < parts["weights"] < 513 * 0.7  # not those of the whole model
        headroom.append(parts["headroom"])
        cache.add(parts["kv-cache"])
    (mib,) = cache
    assert mib == pytest.approx(found["kvTokens"] * found["bytesPerToken"] / 2**20, abs=1)
    binding = found["ranks"][found["bindingRank"]]
    assert headroom[found["bindingRank"]] == min(headroom) == found["memory"]["headroomMiB"]
    assert found["memory"]["parts"] == binding["parts"]
    text = space.condition("CapacityMeasured", "two")["message"]
    assert f"; rank {found['bindingRank']} of 2 has the least memory left" in text


def every_reader_shows_both(space: Any, cluster: Any) -> None:
    found = capacity(space)
    row = columns(space.kubectl("get", "kvl", "-o", "wide").stdout)
    assert (row["READY"], row["REASON"]) == ("1/1", "Serving")
    assert (row["KV-TOKENS"], row["GPUS"]) == (str(found["kvTokens"]), "2")
    titles = [f"rank {number} of 2" for number in (0, 1)]
    titles[found["bindingRank"]] += ": the least memory left"
    for command in ("status", "explain"):
        shown = space.kvline(command, "two").stdout
        assert all(f"\n{title}\n" in shown for title in titles), shown
        assert len(re.findall(r"^total +1,024 ", shown, re.M)) == 2
    words = ("-n", "kvline-system", "get", "service", "kvline-page")
    page = cluster.kubectl(*words, "-o", "jsonpath={.spec.clusterIP}").stdout
    shown = cluster.network.run(["curl", "-sf", f"http://{page}/services/team/two"]).stdout
    assert re.findall("<h3>(.+)</h3>", shown) == titles
    assert f"{found['kvTokens']:,}" in shown and "bytes a token on each of 2 ranks" in shown


def unsupported(shown: str) -> str:
    """What explain shows, where it has what to do."""
    return shown if "spec.resources.gpus to a number" in shown else ""


@pytest.mark.fault(
    "C10", shows="gpus: 2 for nine heads: exit 32, the condition and the numbers that would do"
)
def test_a_number_that_does_not_divide_the_heads_is_refused_with_those_that_do(space: Any) -> None:
    space.apply("two", **NINE_HEADS)
    found = wait(space, "two", "Ready", status="False", reason="Unsupported")
    assert found["message"].startswith("spec.resources.gpus is 2, ")
    assert found["message"].endswith("; gpus can be 1 or 3")
    assert space.condition("ModelAvailable", "two")["message"] == found["message"]
    # Between two starts of its container a replica is Loading, which explain shows then.
    shown = eventually(lambda: unsupported(space.kvline("explain", "two").stdout))
    assert "gpus can be 1 or 3" in shown

    space.apply("two", **THREE)
    wait(space, "two", "UpToDate", status="True")
    assert [rank["rank"] for rank in capacity(space)["ranks"]] == [0, 1, 2]
    answers_of_smollm2(space, "two")
