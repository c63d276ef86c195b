"""The operator is upgraded while pods of either image serve: their sizes, their gate's verdicts and
their records stay. The earlier operator is that of this clone's history, but for its API group."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import earlier
import pytest
from playground import Node, Operator, Space
from rolling import Service
from waiting import NotInTime

from kvline_contract.codec import encode
from kvline_contract.memory import Memory, MemoryV1, Part
from kvline_contract.names import GROUP
from kvline_contract.report import State
from kvline_operator.store import revision_state

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]
PARTS = (Part("weights", 30), Part("experts", 15), Part("kv-cache", 45), Part("others", 10))
# The same as images of version 1 have it.
FIXED = MemoryV1(100, 30, 0, 0, 45, 0, 25)
LATER = ("cacheDtype", "estimates", "tokensPerGiB")  # which the earlier operator did not write
MINIMUM = '{"spec": {"capacity": {"minKVTokens": 100}}}'
Object = dict[str, Any]


@pytest.fixture
def operators(space: Space, tmp_path: Path) -> Iterator[dict[int, Operator]]:
    """By the newest report version that they read. One goes on where the other stopped."""
    tree = tmp_path / "tree"
    if not earlier.unpack(tree, earlier.REPORT_1):
        pytest.skip(f"this clone's history does not reach back to {earlier.REPORT_1}")
    earlier.as_of_group(tree, GROUP)
    made = {version: Operator(space, tmp_path / f"operator-{version}.log") for version in (1, 2)}
    made[1].prefix = ["env", f"PYTHONPATH={tree}/operator:{tree}/server"]
    made[1].identity = made[2].identity
    yield made
    for operator in made.values():
        operator.stop()
        if operator.log.exists():
            assert "Traceback" not in (text := operator.log.read_text()), text[-3000:]


def judged(space: Space, service: Service) -> str:
    """Serves two replicas of 4,096 tokens, and has the gate reject a revision that loses some.
    Returns the serving revision."""
    space.apply(replicas=2)
    service.until(lambda s: service.node.pods())
    first = service.revision(service.node.pods()[0])
    service.tokens[first] = 4096
    service.until_reason("UpToDate")
    space.apply(replicas=2, engine={"maxPrefillTokens": 1024})
    service.tokens[service.candidate()] = 3000
    service.until_reason("RevisionRejected")
    service.until(lambda s: len(service.node.pods()) == 2)
    return first


def kept(status: Object) -> Object:
    """What another operator must not change."""
    capacity = {k: v for k, v in status["capacity"].items() if k not in LATER}
    capacity["memory"] = {k: v for k, v in capacity["memory"].items() if k != "parts"}
    conditions = {f"{c['type']} {c['status']} {c['reason']}" for c in status["conditions"]}
    rollout = status["rollout"]
    return {"capacity": capacity, "conditions": conditions, "rollout": rollout}


def stored(space: Space) -> Object:
    """Verdicts and records as they are kept in objects; an operator of version 1 writes records
    without the parts that it does not know."""
    found = space.get("configmap", "chat-records")
    assert found is not None
    records = json.loads(found["data"]["records.json"])
    for record in records["records"].values():
        record["memory"].pop("parts", None)
    revisions = space.list("controllerrevisions")
    return {
        "records": records,
        "revisions": {r["metadata"]["name"]: revision_state.read(r) for r in revisions},
    }


def settled(service: Service, operator: Operator) -> Object:
    """What is kept, once both replicas are counted and the operator has nothing left to write."""

    def is_settled(status: Object) -> bool:
        capacity = status["capacity"]
        both = capacity.get("kvTokensTotal") == 2 * capacity["kvTokens"]
        complete = "Progressing True Complete" in kept(status)["conditions"]
        return both and complete and operator.writes_nothing()

    return kept(service.until(is_settled))


def takes_over(
    space: Space, before: Operator, after: Operator, service: Service, same: Object
) -> Object:
    """The status once the other operator has reconciled a change and found the `same`."""
    before.stop()
    after.start()
    space.kubectl("patch", "kvl", "chat", "--type=merge", "-p", MINIMUM)
    generation = service.generation()
    seen: list[Object] = []

    def is_same(status: Object) -> bool:
        seen[:] = [kept(status)]
        return bool(status["observedGeneration"] == generation and seen[0] == same)

    try:
        return service.until(is_same)
    except NotInTime as error:
        text = f"{error}\n{seen[0]}\nis to be\n{same}"
        status = (space.get("kvl", "chat") or {}).get("status") or {}
        late = status.get("observedGeneration") != generation
        raise (NotInTime if late else AssertionError)(text) from None


@pytest.mark.parametrize("pods", [1, 2])
def test_sizes_and_verdicts_outlive_an_upgrade_of_the_operator(
    space: Space, operators: dict[int, Operator], node: Node, pods: int
) -> None:
    first, second = 1, 2
    memory = FIXED.upgraded() if pods == 1 else Memory(100, PARTS)
    node.newest, node.ranks = pods, (memory,)
    service = Service(space, node)
    operators[first].start()
    serving = judged(space, service)
    assert node.served == {min(first, pods)}
    before, objects = settled(service, operators[first]), stored(space)
    assert before["rollout"]["gate"]["result"] == "Rejected"
    assert before["capacity"]["kvTokens"] == 4096
    assert before["capacity"]["memory"] == encode(FIXED)
    replicas = {p["metadata"]["uid"] for p in node.pods()}
    node.served.clear()

    status = takes_over(space, operators[first], operators[second], service, before)
    assert stored(space) == objects
    assert {p["metadata"]["uid"] for p in node.pods()} == replicas
    assert node.served == {min(second, pods)}
    assert status["capacity"]["memory"].get("parts") == encode(memory.parts)

    space.apply(replicas=2, engine={"maxModelLen": 512}, capacity={"minKVTokens": 100})
    better = service.candidate()
    service.tokens[better] = 4096  # and the next revision is measured and let through
    service.until(lambda s: s["rollout"]["stableRevision"] == better)
    status = service.until_reason("UpToDate")
    gate = status["rollout"]["gate"]
    assert (gate["revision"], gate["result"], gate["measured"]) == (better, "Passed", 4096)
    assert kept(status)["capacity"]["memory"] == encode(FIXED)
    assert serving not in {service.revision(p) for p in node.pods()}


def test_a_report_of_an_unknown_version_is_named_in_the_status(
    space: Space, operator: Operator, node: Node, until: Callable[..., Any]
) -> None:
    space.apply()
    until(node.pods)
    node.play(State.VALIDATED, raw=b'{"version": 4}', ready=False)
    found = until(lambda: invalid(space))
    assert "report of version 4" in found["message"] and "2 and 3" in found["message"]


def invalid(space: Space) -> Object:
    found = space.condition("CapacityMeasured")
    return found if found.get("reason") == "ReportInvalid" else {}
