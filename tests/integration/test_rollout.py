"""The rollout gate against a real API server: no candidate takes traffic before it has proven its
budget, and what was decided outlives the operator."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest
from playground import eventually
from rolling import Service, is_ready, up_to_date

pytestmark = pytest.mark.integration

BIGGER, SMALLER = {"maxModelLen": 2048}, {"maxModelLen": 2047}


def test_a_candidate_is_measured_alone_and_then_takes_over_replica_by_replica(
    service: Service, space: Any
) -> None:
    stable = service.stable()
    space.apply(replicas=2, engine=BIGGER)
    candidate = service.candidate()
    eventually(lambda: len(service.pods_of(candidate)) == 1)
    service.look()
    assert len(service.pods_of(stable)) == 2 and candidate not in service.served
    service.tokens[candidate] = 3900
    status = service.until_reason("UpToDate")
    gate = status["rollout"]["gate"]
    assert {k: gate[k] for k in ("revision", "result", "measured", "required")} == {
        "revision": candidate,
        "result": "Pass",
        "measured": 3900,
        "required": 3892,
    }
    assert status["rollout"]["stableRevision"] == candidate
    assert service.events("GatePassed") == [
        f"revision {candidate}: measured 3900 KV tokens, 3892 are required (95 % of 4096)"
    ]
    assert service.fewest_ready == 2
    eventually(lambda: len(service.node.pods()) == 2)


def test_half_the_budget_is_rolled_back_and_stays_so_until_somebody_says_otherwise(
    service: Service, space: Any, operator: Any
) -> None:
    first = service.stable()
    before = {p["metadata"]["uid"] for p in service.node.pods()}
    space.apply(replicas=2, engine=SMALLER)
    rejected = service.candidate()
    service.tokens[rejected] = 2048
    status = service.until_reason("RolledBack")
    assert status["rollout"]["rejectedRevision"] == rejected
    assert status["rollout"]["stableRevision"] == first
    assert (
        "measured 2048 KV tokens, 3892 are required (95 % of 4096): 1844 short"
        in (up_to_date(status)["message"])
    )
    assert len(service.events("GateFailed")) == len(service.events("RolledBack")) == 1
    assert rejected not in service.served and service.fewest_ready == 2
    assert {p["metadata"]["uid"] for p in service.node.pods() if is_ready(p)} == before

    operator.stop(signal.SIGKILL)
    operator.start()  # and it remembers
    service.until(lambda s: len(service.node.pods()) == 2)
    space.kubectl("annotate", "kvl", "chat", "touched=yes")
    service.until_reason("RolledBack")
    assert not service.pods_of(rejected)

    space.apply(replicas=2)  # the old spec again: nothing moves, the rejection is history
    service.until_reason("UpToDate")
    assert {p["metadata"]["uid"] for p in service.node.pods()} == before
    stored = space.get("controllerrevisions", f"chat-{rejected}")["metadata"]["annotations"]
    assert stored["kvline.dev/verdict"] == "Failed" and "kvline.dev/against" not in stored
    space.apply(replicas=2, engine=SMALLER)
    service.until_reason("RolledBack")
    assert len(service.events("GateFailed")) == 2

    space.kubectl("annotate", "kvl", "chat", f"kvline.dev/promote={rejected}")
    status = service.until_reason("UpToDate")
    assert status["rollout"]["stableRevision"] == rejected
    assert status["capacity"]["kvTokens"] == 2048
    stored = space.get("controllerrevisions", f"chat-{rejected}")["metadata"]["annotations"]
    assert stored["kvline.dev/verdict"] == "Promoted"
    assert json.loads(stored["kvline.dev/baseline"]) == {"": 2048}


def test_small_losses_do_not_add_up(service: Service, space: Any) -> None:
    """3,950 of 4,096 passes; 3,800 is 96 % of that, and 93 % of the best."""
    for length, tokens, reason in ((2048, 3950, "UpToDate"), (2047, 3800, "RolledBack")):
        space.apply(replicas=2, engine={"maxModelLen": length})
        service.tokens[service.candidate()] = tokens
        status = service.until_reason(reason)
    assert status["rollout"]["gate"]["baseline"] == 4096


def test_another_model_is_held_until_a_minimum_says_what_is_enough(
    service: Service, space: Any
) -> None:
    model = {"source": "pvc://models/other"}
    space.apply(replicas=2, model=model)
    candidate = service.candidate()
    service.tokens[candidate] = 4096
    service.until(lambda s: "cannot be compared" in up_to_date(s)["message"])
    assert up_to_date(service.look())["reason"] == "GateHeld"
    assert candidate not in service.served
    space.apply(replicas=2, model=model, capacity={"minKVTokens": 4000})
    status = service.until_reason("UpToDate")
    assert status["rollout"]["gate"]["required"] == 4000
    assert service.fewest_ready == 2


def test_recreate_frees_the_old_ones_first_and_comes_back_after_a_failure(
    service: Service, space: Any
) -> None:
    first = service.stable()
    how = {"strategy": "Recreate"}
    space.apply(replicas=2, engine=SMALLER, rollout=how)
    candidate = service.candidate()
    service.until(lambda s: not service.pods_of(first) and len(service.pods_of(candidate)) == 2)
    service.tokens[candidate] = 2000
    service.until_reason("RolledBack")
    service.until(lambda s: s["readyReplicas"] == 2 and len(service.pods_of(first)) == 2)
    assert candidate not in service.served


def test_an_engine_that_ends_twice_is_turned_down_and_one_that_waits_is_held(
    service: Service, space: Any
) -> None:
    space.apply(replicas=2, engine=SMALLER)
    candidate = service.candidate()
    (pod,) = eventually(lambda: service.pods_of(candidate))
    status = service.until_reason("GateHeld")  # the scheduler finds no node here
    assert f"{pod['metadata']['name']} has no node" in up_to_date(status)["message"]
    service.node.crash(pod, 40, "40 MiB short", restarts=1)
    status = service.until_reason("RolledBack")
    assert (
        "ended 2 times, with code 40 (OutOfMemory): 40 MiB short" in (up_to_date(status)["message"])
    )
    assert service.fewest_ready == 2


def test_a_spec_that_changes_on_the_way_and_a_pause_keep_what_serves(
    service: Service, space: Any
) -> None:
    """Half shifted, paused, then a third spec: two replicas are ready all along."""
    first = service.stable()
    space.apply(replicas=2, engine=BIGGER)
    second = service.candidate()
    service.tokens[second] = 4096
    service.until(lambda s: second in service.served)
    space.kubectl("annotate", "kvl", "chat", "kvline.dev/paused=true")
    space.apply(replicas=2, engine={"maxModelLen": 2046})
    status = service.until(lambda s: s["rollout"]["candidateRevision"] not in (first, second, ""))
    assert up_to_date(status)["reason"] == "Paused"
    third = status["rollout"]["candidateRevision"]
    assert not service.pods_of(third)
    service.tokens[third] = 4096
    space.kubectl("annotate", "kvl", "chat", "kvline.dev/paused-")
    status = service.until_reason("UpToDate")
    assert status["rollout"]["stableRevision"] not in (first, second)
    assert service.fewest_ready == 2


def test_scaling_during_a_rollout_ends_with_all_of_the_new_revision(
    service: Service, space: Any
) -> None:
    space.apply(replicas=2, engine=BIGGER)
    candidate = service.candidate()
    space.kubectl("scale", "kvl", "chat", "--replicas=3")
    service.until(lambda s: len(service.node.pods()) == 4)  # three stay whole beside the first
    service.tokens[candidate] = 4096
    status = service.until_reason("UpToDate")
    assert (status["rollout"]["stableRevision"], status["readyReplicas"]) == (candidate, 3)
    assert service.fewest_ready >= 2


def test_pods_of_a_passed_revision_are_replaced_while_the_operator_is_away(
    service: Service, space: Any, operator: Any
) -> None:
    """The gate file says what is enough: a replica that measures it serves, one below does not."""
    space.apply(replicas=2, engine=BIGGER)
    revision = service.candidate()
    service.tokens[revision] = 4096
    service.until_reason("UpToDate")
    operator.stop(signal.SIGKILL)
    _lose_one(service, space, revision, 3892, ready=2)
    _lose_one(service, space, revision, 3891, ready=1)


def _lose_one(service: Service, space: Any, revision: str, tokens: int, ready: int) -> None:
    """A pod goes, and what comes for it measures `tokens`; then so many are ready."""
    gone = service.node.pods()[0]["metadata"]
    service.tokens[revision] = tokens
    space.kubectl("delete", "pod", gone["name"], "--grace-period=0", "--force")

    def replaced() -> bool:
        service.look()
        pods = service.node.pods()
        known = {p["metadata"]["uid"] for p in pods}
        return len(pods) == 2 and gone["uid"] not in known and sum(map(is_ready, pods)) == ready

    eventually(replaced, 60)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("first", "tokens", "reason"), [(1, 4096, "UpToDate"), (2, 2048, "RolledBack")]
)
def test_killing_the_operator_at_each_write_of_a_rollout_ends_in_the_same_state(
    service: Service, space: Any, operator: Any, first: int, tokens: int, reason: str
) -> None:
    """F01: a rollout a write, the operator killed right after it, until there is no such write.
    The two stories share their writes, and take every second one each."""
    reached = 0
    for write in range(first, 40, 2):
        stable = service.look()["rollout"]["stableRevision"]
        operator.stop(signal.SIGKILL)
        operator.extra = {"KVLINE_FAULT_WRITE": f"{write}:after"}
        space.apply(replicas=2, engine={"maxModelLen": 1000 + write})
        operator.start()
        died, candidate = _roll(service, operator, tokens, reason)
        assert service.fewest_ready == 2, write
        expected = candidate if reason == "UpToDate" else stable
        assert service.look()["rollout"]["stableRevision"] == expected, write
        assert {service.revision(p) for p in service.node.pods()} == {expected}, write
        if not died:
            break
        reached = write
    assert reached >= 6, reached


def _roll(service: Service, operator: Any, tokens: int, reason: str) -> tuple[bool, str]:
    """Plays a rollout to its end, starting the operator again where it was killed. -> whether it
    was, and the candidate"""
    died, before = False, set(service.tokens)

    def looked() -> bool:
        nonlocal died
        if operator.process.poll() is not None:
            assert operator.process.returncode == 9, "of something else than the fault"
            died, operator.extra = True, {}
            operator.start()
        status = service.look()
        for pod in service.node.pods():
            service.tokens.setdefault(service.revision(pod), tokens)
        new = set(service.tokens) - before
        return (
            bool(new)
            and up_to_date(status).get("reason") == reason
            and (
                status["observedGeneration"]
                == service.space.get("kvl", "chat")["metadata"]["generation"]
                and len(service.node.pods()) == 2
            )
        )

    eventually(looked, 60)
    return died, (set(service.tokens) - before).pop()
